"""What is agreed upon before steps does not become more the longer a run lasts."""

import dataclasses
import threading

from jaxcoll._cluster.key_value import LocalKeys
from jaxcoll._dispatch.watchdog import Watchdog
from jaxcoll._elastic.heartbeat import StepStatus
from jaxcoll._elastic.membership import BLOCK, Membership


def test_members_forget_only_what_all_have_begun():
    keys = LocalKeys(processes=2)
    membership = [
        Membership(
            Watchdog(dataclasses.replace(keys, process=r)),
            "run",
            patience=5.0,
            startup=5.0,
            most=None,
        )
        for r in range(2)
    ]
    entering = threading.Thread(target=membership[1].enter, args=(0,))
    entering.start()
    membership[0].enter(0)
    entering.join()

    def begin(*steps):
        for one, step in zip(membership, steps, strict=True):
            one.status = StepStatus(0, step)
            one._write_heartbeat()

    for step in range(0, 3 * BLOCK, 10):
        begin(step, 0)
        assert not membership[0].joins_at(step)
    assert len(keys.all("run/0/step")) == 3 * BLOCK / 10  # the other may still ask
    assert not membership[1].joins_at(0)
    begin(3 * BLOCK, 2 * BLOCK + 5)
    assert not membership[0].joins_at(3 * BLOCK)
    assert len(keys.all("run/0/step")) == BLOCK / 10 + 1
    for one in membership:
        one.close()
        one._watchdog.end()
