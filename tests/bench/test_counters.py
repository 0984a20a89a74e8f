"""What the kernel counts, as it prints it."""

import pytest

from jaxcoll.bench.counters import busy_ticks, transmitted_bytes

NET = """Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed
    lo: 5000 12 0 0 0 0 0 0 4000 12 0 0 0 0 0 0
  eth0:88888888 34 0 0 0 0 0 0 77 34 0 0 0 0 0 0
"""


def test_transmitted_bytes():
    assert transmitted_bytes(NET, "lo") == 4000
    assert transmitted_bytes(NET, "eth0") == 77
    for bad in ("", NET.replace("lo:", "lo"), "lo: 1 2 3"):
        with pytest.raises(
            ValueError, match=r"expected the text of /proc/net/dev with a line for 'lo'"
        ):
            transmitted_bytes(bad, "lo")


def test_busy_ticks():
    assert (
        busy_ticks("cpu  10 20 30 400 50 6 7 80 9 9\ncpu0 1 1 1 1 1 1 1 1\n")
        == 10 + 20 + 30 + 6 + 7
    )
    for bad in ("", "cpu 1 2", "intr 1 2 3 4 5 6 7 8"):
        with pytest.raises(ValueError, match=r"expected the text of /proc/stat, with 'cpu' first"):
            busy_ticks(bad)
