"""What a launcher passes on: all of it, in whole lines, at once, and waiting for nobody."""

import errno
import io
import os
import threading
import time

import pytest

from jaxcoll._cluster.launch import output as launch_output
from jaxcoll._cluster.launch.output import Lines, Outlet, Output
from jaxcoll._cluster.launch.subprocesses import signal_name


class Printing:
    """In the place of a process: its standard output is a pipe that the test writes."""

    stderr = None

    def __init__(self):
        reader, self._writer = os.pipe()
        self.stdout = os.fdopen(reader, "rb")

    def print(self, data):
        os.write(self._writer, data)

    def end(self):
        os.close(self._writer)


def passed_on(*chunks, quiet=False):
    """The pieces in which chunks are passed on."""
    pieces, process = [], Printing()
    found = Lines(lambda rank, stream, piece: pieces.append(piece))
    found.of(0, process)
    for chunk in chunks:
        process.print(chunk)
        found.pass_on(1.0)
        until = time.monotonic() + 10
        before = len(pieces)
        while quiet and len(pieces) == before and time.monotonic() < until:
            found.pass_on(0.01)
    process.end()
    found.finish()
    return pieces


@pytest.mark.parametrize(
    ("chunks", "pieces"),
    [
        ([b"a\nb", b"c\n", b"d"], [b"a\n", b"bc\n", b"d\n"]),
        ([b"\n\na\n"], [b"\n", b"\n", b"a\n"]),
        ([b"1 %\r2 %\r", b"3 %\n"], [b"1 %\r", b"2 %\r", b"3 %\n"]),
        ([b"\r1 %", b"\r2 %", b"\n"], [b"\r", b"1 %\r", b"2 %\n"]),
        ([b"dos\r\nline\r", b"\nend"], [b"dos\r\n", b"line\r\n", b"end\n"]),
        ([b""], []),
    ],
    ids=["lines", "empty", "bar", "tqdm", "dos", "nothing"],
)
def test_a_piece_ends_with_a_line_or_a_bar(chunks, pieces):
    assert passed_on(*filter(None, chunks)) == pieces


def test_a_bar_is_seen_before_the_next_one_comes():
    found = passed_on(b"\r1 %", b"\r2 %", quiet=True)
    assert found == [b"\r", b"1 %", b"\r", b"2 %"] or found == [b"\r", b"1 %\r", b"2 %"]


def test_a_line_that_is_written_in_two_is_passed_on_in_one(monkeypatch):
    monkeypatch.setattr(launch_output, "_QUIET", 0.0)
    assert passed_on(b"half a ", b"line\n") == [b"half a line\n"]


def test_a_line_without_end_is_copied_once_and_broken_where_it_is_too_long(monkeypatch):
    monkeypatch.setattr(launch_output, "LONGEST", 1000)
    found = passed_on(*[b"x" * 300] * 10, b"\n")
    assert b"".join(found) == b"x" * 3000 + b"\n"
    assert [len(piece) for piece in found] == [1200, 1200, 601]


def test_what_has_no_room_stays_with_its_process():
    pieces, process, room = [], Printing(), [False]
    found = Lines(lambda *piece: pieces.append(piece), lambda stream: room[0])
    found.of(3, process)
    process.print(b"words\n")
    found.pass_on(1.0)
    assert pieces == []
    found.pass_on(1.0, freely=True)
    assert pieces == [(3, "out", b"words\n")]
    room[0] = True
    process.print(b"more\n")
    found.pass_on(1.0)
    process.end()
    found.finish()
    assert pieces[1:] == [(3, "out", b"more\n")]


def test_the_end_waits_for_nobody_who_prints_on_and_on():
    process = Printing()
    found = Lines(lambda *_: process.print(b"again\n"))
    found.of(0, process)
    process.print(b"first\n")
    found.finish()
    assert process.stdout.closed


class Stream(io.RawIOBase):
    def __init__(self, *errors):
        self.written, self.errors, self.opened = b"", list(errors), threading.Event()

    def writable(self):
        return True

    def write(self, data):
        assert self.opened.wait(30)
        if self.errors and (error := self.errors.pop(0)) is not None:
            raise error
        taken = bytes(data)[:5]
        self.written += taken
        return len(taken)


def test_a_reader_that_stops_holds_up_its_writer_and_nobody_else():
    stream = Stream()
    outlet = Outlet(stream, lambda reason: None)
    outlet.put(b"first")
    outlet.put(b"x" * (1 << 20))
    assert not outlet.has_room
    assert not outlet.drain(lambda: True)
    outlet.put(b"y" * (9 << 20))
    outlet.put(b"left out")
    stream.opened.set()
    until = time.monotonic() + 60
    while not stream.written.startswith(b"firstxxx") and time.monotonic() < until:
        time.sleep(0.01)
    assert stream.written.startswith(b"firstxxx")
    stream.errors += [BrokenPipeError(), BrokenPipeError()]  # it would write on and on
    assert outlet.drain(lambda: False)


def test_a_full_disk_is_named_once_and_what_comes_later_is_written():
    complaints, full = [], OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    stream = Stream(full, full)
    stream.opened.set()
    outlet = Outlet(stream, complaints.append)
    for words in (b"one", b"two", b"three"):
        outlet.put(words)
        assert outlet.drain(lambda: False)
    assert (stream.written, complaints) == (b"three", ["No space left on device"])


def test_a_reader_who_left_is_not_complained_to():
    stream = Stream(BrokenPipeError(errno.EPIPE, "Broken pipe"))
    stream.opened.set()
    outlet = Outlet(stream, pytest.fail)
    outlet.put(b"one")
    assert outlet.drain(lambda: False)
    outlet.put(b"two")
    assert outlet.drain(lambda: False)
    assert stream.written == b""


def test_pieces_are_shown_behind_their_rank(monkeypatch):
    out, err = Stream(), Stream()
    for name, stream in (("stdout", out), ("stderr", err)):
        stream.opened.set()
        monkeypatch.setattr(f"sys.{name}", io.TextIOWrapper(io.BufferedWriter(stream)))
    output = Output()
    for rank, piece in [
        (0, b"a\n"),
        (1, b"\r"),
        (1, b"5 %"),
        (0, b"b\n"),
        (1, b"9 %\r"),
        (1, b"\n"),
    ]:
        output.show(rank, "out", piece)
    monkeypatch.setattr(launch_output, "LONGEST", 10)
    output.show(0, "out", b"z" * 11)
    output.complain("words")
    assert output.drain(lambda: False)
    assert out.written == b"[0] a\n[1] 5 %\r[0] b\n[1] 9 %\r\n[0] zzzzzzzzzzz\n"
    assert err.written == b"jaxcoll launch: words\n"


def test_every_signal_has_a_name():
    names = [signal_name(number) for number in range(1, 65)]
    assert len(set(names)) == 64
    assert signal_name(9) == "SIGKILL"
    assert signal_name(35) == "SIGRTMIN+1"
