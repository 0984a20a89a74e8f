"""A result replaces a regular file in one step, and changes nothing else that stands at its path."""

import errno
import os
import socket
import stat
import threading
from pathlib import Path

import forks
import numpy as np
import pytest

import jaxcoll as jc
from jaxcoll import _files
from jaxcoll._files import check_writable, replacing, write_text
from jaxcoll.cli.main import main

HLO = str(Path(__file__).parent / "observe" / "golden" / "gpu-0.12.0.1-overlapped.hlo")


def by_plan(path):
    assert main(["plan", "--tree", "200x1KiB", "--json", str(path)]) == 0


def by_inspect(path):
    assert main(["inspect", HLO, "--json", str(path)]) == 0


def by_picture(path):
    assert main(["inspect", HLO, "--plot", str(path)]) == 0


def by_method(path):
    jc.inspect(Path(HLO).read_text()).plot(path)


def by_checkpoint(path):
    jc.save_checkpoint(path, {"w": np.ones(100)})


WRITERS = [by_plan, by_inspect, by_picture, by_method, by_checkpoint]


@pytest.fixture
def umask():
    before = os.umask(0o027)
    yield
    os.umask(before)


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.usefixtures("umask")
@pytest.mark.parametrize("write", WRITERS)
def test_a_file_keeps_its_mode_its_links_and_the_umask(write, tmp_path):
    real, link, dangling = tmp_path / "real", tmp_path / "link.png", tmp_path / "dangling.png"
    link.symlink_to("real")
    dangling.symlink_to("made")
    write(real)
    assert mode_of(real) == 0o640, "what the umask leaves"
    real.write_text("old")
    real.chmod(0o600)
    write(link)
    write(dangling)
    assert (os.readlink(link), os.readlink(dangling)) == ("real", "made")
    assert real.stat().st_size > 100
    assert (mode_of(real), mode_of(tmp_path / "made")) == (0o600, 0o640)
    assert {p.name for p in tmp_path.iterdir()} == {"real", "made", "link.png", "dangling.png"}


@pytest.mark.parametrize("write", WRITERS)
def test_a_pipe_is_written_to_and_stays_one(write, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    write(pipe)
    reader.join(10)
    assert len(read[0]) > 100
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert [p.name for p in tmp_path.iterdir()] == ["pipe"]


@pytest.mark.parametrize("write", WRITERS)
def test_a_device_stays_a_device(write):
    before = os.stat(os.devnull)
    write(Path(os.devnull))
    after = os.stat(os.devnull)
    assert (after.st_mode, after.st_rdev, after.st_ino) == (
        before.st_mode,
        before.st_rdev,
        before.st_ino,
    )


@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1", "link"])
def test_an_open_file_of_this_process_is_written_where_it_stands(name, tmp_path):
    (tmp_path / "link").symlink_to("/dev/stdout")
    code = (
        "import os, pathlib, sys; from jaxcoll._files import write_text\n"
        "os.write(1, b'before '); write_text('--json', pathlib.Path(sys.argv[0]), 'result')\n"
        "os.write(1, b' after')"
    )
    done = forks.with_commands().run(code, name, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "before result after"), done.stderr


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: path.mkdir(), r"it is a folder"),
        (lambda path: socket.socket(socket.AF_UNIX).bind(str(path)), r"it is a socket"),
        (lambda path: path.symlink_to(path.name), r"Too many levels of symbolic links"),
        (lambda path: path.symlink_to("/proc/no/such"), r"No such file or directory"),
    ],
    ids=["folder", "socket", "loop", "nowhere"],
)
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_what_cannot_be_written_is_refused_before_the_work(make, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make(Path("x"))
    for refuse in (check_writable, lambda *where: write_text(*where, "text")):
        with pytest.raises(ValueError, match=rf"--json: cannot write x.*{words}"):
            refuse("--json", Path("x"))
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_a_file_that_may_not_be_written_is_not_replaced(tmp_path, monkeypatch):
    file = tmp_path / "x"
    file.write_text("kept")
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everything
    with pytest.raises(ValueError, match="--json: cannot write .* \\(Permission denied\\)"):
        check_writable("--json", file)
    with pytest.raises(PermissionError), replacing(file):
        pass
    assert file.read_text() == "kept"


def test_to_look_whether_it_can_be_written_changes_nothing(tmp_path):
    pipe, file, new = tmp_path / "pipe", tmp_path / "file", tmp_path / "new"
    os.mkfifo(pipe)
    file.write_text("old")
    for path in (pipe, file, new):
        check_writable("--json", path)  # which would wait for ever, had it opened the pipe
    assert file.read_text() == "old"
    assert {p.name for p in tmp_path.iterdir()} == {"pipe", "file"}


def test_a_file_that_is_a_mount_point_is_written_in_place(tmp_path, monkeypatch):
    def busy(*_):
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    file = tmp_path / "x"
    file.write_text("old")
    number = file.stat().st_ino
    monkeypatch.setattr(Path, "replace", busy)
    write_text("--json", file, "new")
    assert (file.read_text(), file.stat().st_ino) == ("new", number)
    monkeypatch.setattr(_files, "_to_disk", busy)
    with pytest.raises(ValueError, match="--json: cannot write .* busy"):
        write_text("--json", file, "newer")
    assert (file.read_text(), [p.name for p in tmp_path.iterdir()]) == ("new", ["x"])


def test_a_full_device_is_named():
    with pytest.raises(ValueError, match=r"--json: cannot write /dev/full \(No space left"):
        write_text("--json", Path("/dev/full"), "text")
