"""Reports of hangs: the process that did not arrive, and where it is."""
