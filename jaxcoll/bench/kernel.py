"""Reads the Linux kernel's own counters: what went through the network, how busy cores were."""

from __future__ import annotations


def transmitted_bytes(text: str, interface: str) -> int:
    r"""Bytes that left through an interface since the machine started, headers included.

    Between processes of one host everything goes through "lo", where each packet leaves once.

    Args:
      text: what /proc/net/dev holds.
      interface: its name there.

    Returns:
      Bytes.

    Raises:
      ValueError: the text has no such interface.

    Examples:
      >>> head = "Inter-| Receive | Transmit\n face |bytes packets ... |bytes packets ...\n"
      >>> transmitted_bytes(head + "   lo: 900 3 0 0 0 0 0 0 700 2 0 0 0 0 0 0\n", "lo")
      700
    """
    for line in text.splitlines():
        name, colon, counters = line.partition(":")
        fields = counters.split()
        if colon and name.strip() == interface and len(fields) >= 9:
            return int(fields[8])
    raise ValueError(
        f"expected the text of /proc/net/dev with a line for {interface!r}; got {text[:80]!r}."
    )


def busy_ticks(text: str) -> int:
    r"""Clock ticks that all cores together have spent at work since the machine started.

    Args:
      text: what /proc/stat holds.

    Returns:
      Ticks of user, nice, system, interrupts; neither idle nor waiting nor stolen.

    Raises:
      ValueError: the text does not begin with the line of all cores.

    Examples:
      >>> busy_ticks("cpu  100 1 20 9999 50 2 3 7 0 0\ncpu0 ...\n")
      126
    """
    fields = text.partition("\n")[0].split()
    if len(fields) < 8 or fields[0] != "cpu":
        raise ValueError(f"expected the text of /proc/stat, with 'cpu' first; got {text[:80]!r}.")
    user, nice, system, _, _, interrupts, soft = map(int, fields[1:8])
    return user + nice + system + interrupts + soft
