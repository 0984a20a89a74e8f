"""Several calls at the same time, each in a thread, in the place of processes."""

import threading
import time


def wait_for(condition, within=60.0, why=lambda: ""):
    """Wait until a condition holds."""
    until = time.monotonic() + within
    while not condition():
        assert time.monotonic() < until, why()
        time.sleep(0.01)


def at_once(*calls):
    """What each call returns, or the exception that it raises; a failed assertion is raised here."""
    results = [None] * len(calls)

    def go(i):
        try:
            results[i] = calls[i]()
        except Exception as error:
            results[i] = error

    threads = [threading.Thread(target=go, args=(i,), daemon=True) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    for failed in results:
        if isinstance(failed, AssertionError):
            raise failed
    return results
