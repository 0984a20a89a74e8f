"""Who cannot connect to whom, and how few are left out for it."""

import os
import socket

import pytest

from jaxcoll._cluster import gloo_sockets
from jaxcoll._elastic.generation import named_links, to_leave_out


def pairs(*numbers):
    return {frozenset((f"{one}.a", f"{other}.a")) for one, other in numbers}


@pytest.mark.parametrize(
    ("cut", "newcomers", "out"),
    [
        ((), (), ()),
        (((1, 2),), (), (2,)),
        (((1, 2),), (1,), (1,)),
        (((0, 1), (0, 2), (0, 3)), (), (0,)),
        (((0, 2), (0, 3), (1, 2), (1, 3)), (), (2, 3)),
        (((0, 1), (2, 3)), (), (1, 3)),
        (((0, 1), (1, 2), (0, 2)), (), (1, 2)),
    ],
)
def test_whoever_has_the_most_broken_links_is_left_out(cut, newcomers, out):
    found = to_leave_out(pairs(*cut), {f"{n}.a" for n in newcomers})
    assert found == {f"{n}.a" for n in out}
    assert not [link for link in pairs(*cut) if not link & found]


def test_few_of_many_broken_links_are_named():
    text = named_links(pairs((1, 2), (2, 10)))
    assert text == "workers 1 and 2, and workers 2 and 10 cannot connect to each other"
    many = named_links(pairs((0, 5), (0, 6), (0, 7), (0, 8)))
    assert many.endswith("workers 0 and 7 cannot connect to each other, nor 1 more pairs")


def test_who_answers_or_refuses_is_reached_and_who_is_silent_is_not():
    before = len(os.listdir("/dev/fd"))
    with (
        gloo_sockets.open_port("127.0.0.1") as there,
        socket.socket() as bound,
        socket.create_server(("127.0.0.1", 0), backlog=0) as silent,
        socket.create_connection(silent.getsockname()),  # all that it has room for
    ):
        bound.bind(("127.0.0.1", 0))  # and does not listen
        addresses = {"there": there, "ended": bound, "silent": silent}
        found = gloo_sockets.unreachable({n: s.getsockname() for n, s in addresses.items()}, 0.5)
        assert found == ["silent"]
        assert gloo_sockets.unreachable({"there": there.getsockname()}, 0.5) == []
    assert len(os.listdir("/dev/fd")) == before
