"""When profiles are opened, and for how long; what is in them is made up."""

import time
import types

import pytest

from jaxcoll._report import programs
from jaxcoll._report.profile import window as module
from jaxcoll._report.profile.shield import Shield


class Compilations:
    """One program that communicates, compiled long ago."""

    modules, at = {"jit_step"}, 0.0
    programs = list
    calls = types.SimpleNamespace(number=0)


@pytest.fixture
def opened(monkeypatch):
    """The seconds for which each profile was to be open; `opened.steps` is how many a second."""

    class Opened(list):
        steps = 0.0  # a second
        begins = 0, 0.0  # after so many profiles, so many a second
        others = 0.0  # events a second of programs that do not communicate

    found = Opened()

    class Session:
        def __init__(self, *, with_programs):
            pass

        def stop(self):
            found.append(found.asked)
            if len(found) == found.begins[0]:
                found.steps = found.begins[1]
            return b"%s %g" % (b"jit_step" * bool(found.steps or found.others), found.asked)

    opens = module.Window._open

    def open_for(self, seconds):
        found.asked = seconds
        return opens(self, seconds)

    def count_runs(profile, _):
        seconds = float(profile.split()[-1])
        steps, others = (int(n * seconds) for n in (found.steps, found.others))
        return steps + others, steps

    monkeypatch.setattr(module, "ProfilerSession", Session)
    monkeypatch.setattr(module.Window, "_open", open_for)
    monkeypatch.setattr(programs, "count_runs", count_runs)
    monkeypatch.setattr(module, "store", lambda: None)
    monkeypatch.setattr(module, "_PROBES", (0.02, 0.05, 0.1))
    monkeypatch.setattr(module, "_QUIET_SECONDS", 0.01)
    monkeypatch.setattr(module, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(module, "_LONGEST_SECONDS", 0.4)
    return found


def window(runs=20):
    made = module.Window(Compilations(), runs, "w", "block", Shield(), with_programs=False)
    made.start()
    return made


def test_window_fits_its_runs(opened):
    opened.steps = 300.0
    found = window(30)
    found.join(10)
    assert 0.1 <= opened[-1] < 0.3
    found.close()
    assert (found.note, found.profile) == ("", b"jit_step %g" % opened[-1])


def test_idle_program_opens_short_windows(opened):
    opened.others = 100.0
    opened.begins = 6, 300.0
    found = window()
    found.join(10)
    assert len(opened) > 4
    assert max(opened[:-1]) == module._PROBES[-1]
    assert 0.06 <= opened[-1] < 0.3


def test_many_events_bound_window(opened, monkeypatch):
    monkeypatch.setattr(module, "_MOST_EVENTS", 4000)
    opened.steps, opened.others = 60.0, 60_000.0
    found = window()
    found.join(10)
    assert opened[-1] < 0.2, "of slow steps among many events"
    found.close()
    assert found.profile


def test_early_end_keeps_probe(opened):
    found = window()
    while not opened:
        time.sleep(0.01)
    found.close()
    assert found.note == module.EARLY.format("block", module._RUN)
    assert found.profile in (b" %g" % seconds for seconds in opened)


def test_compilation_keeps_windows_closed(opened):
    compilations = Compilations()
    compilations.at = time.monotonic() + 1e6
    found = module.Window(compilations, 9, "w", "program", Shield(), with_programs=False)
    found.start()
    found.join(0.2)
    found.close()
    assert not opened
    assert found.note == module.EARLY.format("program", module._QUIET)


def test_probes_take_little_time(opened, monkeypatch):
    monkeypatch.setattr(module, "_RECORDING", 1.0)  # a byte costs a second
    found = window()
    found.join(0.5)
    found.close()
    assert len(opened) == 1, "the next would cost too much"
    assert found.note == module.EARLY.format("block", module._FREE)
