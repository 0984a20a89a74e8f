"""Run compiled programs: deadlines, process groups, the watchdog, fingerprints."""
