"""Values that the processes of a job exchange, as JSON in its key-value store.

`exchange` waits for a value of everybody, `agree` for the first one. The store is the job's, or
a `CoordinatorClient` where the coordinator may die meanwhile.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from jaxcoll._job.timing import POLL_SECONDS
from jaxcoll.errors import DeadlineExceededError

if TYPE_CHECKING:
    from jaxcoll._job.key_value import CoordinatorClient, Keys

Who = TypeVar("Who", bound=Hashable)


class LateError(DeadlineExceededError):
    """Some did not answer in time: those in `late`. `values` has the answers that came."""

    def __init__(self, late: Sequence[Any], values: dict[Any, Any], seconds: float) -> None:
        names = f"rank{'s' * (len(late) > 1)} {', '.join(map(str, late))}"
        numbers = [who for who in late if isinstance(who, int)]
        super().__init__(f"{names} did not answer within {seconds:g} s.", ranks=numbers)
        self.late, self.values = late, values


def exchange(
    keys: Keys | CoordinatorClient,
    name: str,
    value: Any,
    group: Sequence[Who],
    seconds: float,
    *,
    me: Who | None = None,
    check: Callable[[list[Who]], None] = lambda late: None,
    woken: threading.Event | None = None,
) -> dict[Who, Any]:
    """Write this process's JSON value, and return those of all in `group`: numbers, or other names.

    `name` is unique to this exchange, and `me` this process's name in the group, if that is not its
    number. `check` gets those that are late so far, after each look, and may raise; `woken` makes
    it look at once.

    Raises:
      LateError: the time is up.
    """
    keys.set(f"{name}/{keys.process if me is None else me}", json.dumps(value))
    until, pause = time.monotonic() + seconds, threading.Event() if woken is None else woken
    while True:
        texts = keys.all(name)
        values = {who: json.loads(texts[str(who)]) for who in group if str(who) in texts}
        late = [who for who in group if who not in values]
        if not late:
            return values
        check(late)
        if time.monotonic() >= until:
            raise LateError(late, values, seconds)
        pause.wait(POLL_SECONDS)


def agree(keys: Keys | CoordinatorClient, name: str, value: Any) -> Any:
    """Get the first value that any process gave by this name: the same for all of them."""
    return json.loads(keys.agree(name, json.dumps(value)))
