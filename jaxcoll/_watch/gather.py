"""Rows of all processes, by the key-value store that they have in common."""

from __future__ import annotations

import base64
import json
import time
import zlib
from typing import Any

from jaxcoll._compat.coordination import StoreUnreachableError, store

_PATIENCE_SECONDS = 10.0


def gathered(own: dict[str, Any], name: str, *, everywhere: bool) -> tuple[dict[int, Any], str]:
    """Return what each rank gave, by rank, and a note on those that did not answer.

    Alone, and where nobody answers, that is `own`. Cost: a message from each process, compressed.

    Args:
      own: plain values.
      name: the same on all processes, of no other call.
      everywhere: on all ranks; otherwise on the first alone, and others have their own.
    """
    keys = store()
    if keys is None or keys.processes == 1:
        return {0: own}, ""
    ranks: dict[int, Any] = {keys.process: own}
    try:
        packed = zlib.compress(json.dumps(own).encode(), 6)
        keys.set(f"{name}/{keys.process}", base64.b85encode(packed).decode())
        if keys.process and not everywhere:
            return ranks, ""
        until = time.monotonic() + _PATIENCE_SECONDS
        for rank in sorted({*range(keys.processes)} - {keys.process}):
            try:
                packed = keys.get(f"{name}/{rank}", max(0.1, until - time.monotonic()))
            except TimeoutError:
                continue
            ranks[rank] = json.loads(zlib.decompress(base64.b85decode(packed)))
    except StoreUnreachableError:
        pass  # those that answered before are in
    missing = sorted({*range(keys.processes)} - {*ranks})
    names = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
    note = f"{names} did not answer within {_PATIENCE_SECONDS:g} s." if missing else ""
    return dict(sorted(ranks.items())), note
