"""A checkpoint is whole or not there, and holds what was put in, to the bit."""

import contextlib
import errno
import functools
import itertools
import os
import signal
import sys
import tempfile
from pathlib import Path
from threading import Event, Thread

import forks
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import jaxcoll as jc
from jaxcoll._job.coordinator_proxy import CoordinatorProxy
from jaxcoll._job.socket_folder import make_socket_folder
from jaxcoll._train.elastic import checkpoint
from jaxcoll._train.elastic.checkpoint import Stamp, read_stamp, save_newest
from jaxcoll.cli import launch

ADDED = [
    np.dtype(kind)
    for kind in vars(ml_dtypes).values()
    if isinstance(kind, type) and issubclass(kind, np.generic)
]
NUMPYS = [np.dtype(kind) for kind in "?bBhHiIlLqQefdgFDG"] + [np.dtype(">f4")]
KEYS = ["threefry2x32", "rbg", "unsafe_rbg"]


@st.composite
def arrays(draw):
    dtype = draw(st.sampled_from(ADDED + NUMPYS))
    shape = draw(st.sampled_from([(), (0,), (3,), (2, 0), (1, 2, 3)]))
    count = int(np.prod(shape, dtype=int)) * dtype.itemsize
    bits = draw(st.binary(min_size=count, max_size=count))
    if dtype.kind == "b":
        bits = bytes(b & 1 for b in bits)
    return np.frombuffer(bits, dtype).reshape(shape)


LEAVES = arrays() | st.sampled_from(KEYS).map(lambda impl: jax.random.key(7, impl=impl))
NAMES = st.sampled_from(["a/b", "", "..", "w", "leaf0", "about.json"])
TREES = st.dictionaries(NAMES, LEAVES | st.lists(LEAVES, max_size=2), max_size=4)


def bits(x):
    return (jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x).tobytes()


def check_same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert bits(one) == bits(other)


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(tree=TREES, step=st.integers(0, 1 << 40))
def test_trees_come_back_whole(tmp_path, tree, step):
    path = tmp_path / "deep" / "last.npz"
    jc.save_checkpoint(path, tree, step=step)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
    for like in (tree, abstract):
        back, at = jc.restore_checkpoint(str(path), like)
        assert at == step
        check_same(back, tree)


NUMBERS = {
    "bool": True, "int": 7, "float": 0.1, "complex": 2j,
    "scalar": np.float32(0.5), "double": np.float64(0.5), "half": ml_dtypes.bfloat16(2),
    "weak": jnp.asarray(0.1), "weak integer": jnp.asarray(7), "weak rows": jnp.broadcast_to(2.5, (3,)),
    "strong": jnp.float32(2), "host": np.array(0.5),
}  # fmt: skip


def typed(tree):
    """What promotion depends on: Python's types, and JAX's."""

    def kind(x):
        aval = jax.typeof(x)
        return aval.str_short(), aval.weak_type, isinstance(x, float | int)

    return jax.tree.map(kind, tree, is_leaf=lambda x: isinstance(x, tuple))


@pytest.mark.parametrize("x64", [False, True])
def test_kinds_of_numbers_come_back(tmp_path, x64):
    path = tmp_path / "c.npz"
    with jax.enable_x64(x64):
        tree = {**NUMBERS, "weak": jnp.asarray(0.1), "large": 2**31 + 1 if x64 else 1}
        jc.save_checkpoint(path, tree)
        back, _ = jc.restore_checkpoint(path, tree)
        assert typed(back) == typed(tree)
        for name, x in tree.items():
            assert np.array_equal(back[name], x), name
            assert type(back[name]) is type(x) or name == "strong"
        # A training step makes arrays of numbers, which may grow; either may be saved or wanted.
        tree = {name: x for name, x in tree.items() if name not in ("double", "host")}
        for saved, like in itertools.permutations((tree, jax.jit(lambda tree: tree)(tree))):
            jc.save_checkpoint(path, saved)
            back, _ = jc.restore_checkpoint(path, like)
            assert typed(back) == typed(saved)
        for saved, like in itertools.permutations(({"n": 0}, {"n": jnp.int32(7)})):
            jc.save_checkpoint(path, saved)
            back, _ = jc.restore_checkpoint(path, like)
            assert (typed(back), back) == (typed(saved), saved)
        with pytest.raises(ValueError, match=r"\['n'\] is int32\[\] in the file, but float"):
            jc.restore_checkpoint(path, {"n": 1.0})


def test_older_files_are_read(tmp_path, monkeypatch):
    dumps = checkpoint.json.dumps
    without = lambda about: dumps({k: x for k, x in about.items() if k != "kinds"})
    with monkeypatch.context() as older:
        older.setattr(checkpoint.json, "dumps", without)
        jc.save_checkpoint(tmp_path / "old.npz", NUMBERS)
    back, _ = jc.restore_checkpoint(tmp_path / "old.npz", NUMBERS)
    assert typed(back) == typed(NUMBERS)


def test_bfloat16_run_resumes_exactly(tmp_path):
    """By `Elastic`; with files alone tests/processes/test_gloo.py has it."""
    start, path = {"w": jnp.ones(4, jnp.bfloat16), "rate": 0.3, "count": 0}, tmp_path / "e.npz"
    rows = np.arange(8, dtype="f") / 8

    @jc.data_parallel
    def step(state, batch):
        mean = jc.pmean(jnp.mean(batch).astype(jnp.bfloat16))
        w = state["w"] - state["rate"] * mean * state["w"]
        return {"w": w, "rate": state["rate"] * 0.5, "count": state["count"] + 1}, mean

    want = functools.reduce(lambda state, _: step(state, rows)[0], range(4), start)
    for total in (2, 4):  # with a start from the file between them
        got = jc.Elastic(step, start, checkpoint=path).run(lambda _: rows, total)
    check_same(got, want)
    for found in (got, jc.restore_checkpoint(path, start)[0]):
        assert typed(found) == typed(want)


def test_numpy_reads_files(tmp_path):
    jc.save_checkpoint(tmp_path / "x.npz", {"A": np.arange(6.0).reshape(2, 3)})
    with np.load(tmp_path / "x.npz", allow_pickle=False) as archive:
        np.testing.assert_array_equal(archive["leaf0"], np.arange(6.0).reshape(2, 3))


class Pair:
    """Both children under one key, as a careless registration has them."""

    def __init__(self, *children):
        self.children = children


jax.tree_util.register_pytree_with_keys(
    Pair,
    lambda pair: ([(jax.tree_util.GetAttrKey("x"), child) for child in pair.children], None),
    lambda _, children: Pair(*children),
)


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"pair": Pair(np.ones(2), np.zeros(3))}, r"two leaves of the tree have the path \['pair'\].x"),
        ({"s": "words"}, r"state\['s'\] must be an array of numbers; got str"),
        ({"s": np.zeros(1, [("x", "f4")])}, "must be an array of numbers; got ndarray"),
        ({"s": np.zeros(1, "V4")}, "must be an array of numbers; got ndarray"),
        ({"s": np.zeros(1, "M8[s]")}, "must be an array of numbers; got ndarray"),
        ({"s": np.ma.array([1.0])}, "must be an array of numbers; got MaskedArray"),
        ({"s": object()}, "must be an array of numbers; got object"),
    ],
)  # fmt: skip
def test_unreadable_trees_are_not_written(tmp_path, tree, words):
    with pytest.raises(ValueError, match=words):
        jc.save_checkpoint(tmp_path / "last.npz", tree)
    with pytest.raises(ValueError, match=r"`step` must be a whole number; got 1\.5"):
        jc.save_checkpoint(tmp_path / "last.npz", {}, step=1.5)
    assert not [*tmp_path.iterdir()]


def full(*args, **kwargs):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("where", ["write_array", "fsync"])
def test_full_disk_keeps_old_file(tmp_path, monkeypatch, where):
    path = tmp_path / "last.npz"
    jc.save_checkpoint(path, {"w": np.ones(3)}, step=1)
    monkeypatch.setattr(os if where == "fsync" else np.lib.format, where, full)
    with pytest.raises(OSError, match="No space left") as e:
        jc.save_checkpoint(path, {"w": np.zeros(3)}, step=2)
    assert "after step 2 could not be written" in e.value.__notes__[0]
    assert jc.restore_checkpoint(path, {"w": np.ones(3)})[1] == 1
    assert [p.name for p in tmp_path.iterdir()] == ["last.npz"]


@pytest.mark.parametrize(
    ("like", "words"),
    [
        ({"w": np.ones(3, "f"), "b": np.ones(1)}, r"another tree \(missing leaves: \['b'\]; extra leaves: none"),
        ({}, r"missing leaves: none; extra leaves: \['w'\]"),
        ({"w": np.ones(4, "f")}, r"the leaf \['w'\] is float32\[3\] in the file, but float32\[4\] in `like`"),
        ({"w": np.ones(3, "i")}, r"float32\[3\] in the file, but int32\[3\] in `like`"),
        ({"w": jax.random.key(0)}, r"float32\[3\] in the file, but key<fry>\[\] in `like`"),
    ],
)  # fmt: skip
def test_other_trees_are_refused(tmp_path, like, words):
    jc.save_checkpoint(tmp_path / "c.npz", {"w": np.ones(3, "f")})
    with pytest.raises(ValueError, match=words):
        jc.restore_checkpoint(tmp_path / "c.npz", like)


def test_broken_files_are_refused(tmp_path):
    path, like = tmp_path / "c.npz", {"w": np.ones(1000)}
    words = "is not a complete checkpoint of jaxcoll"
    jc.save_checkpoint(path, like)
    whole = path.read_bytes()
    for broken in (whole[:300], whole[:-30], b"words, which NumPy takes for a pickle", b""):
        path.write_bytes(broken)
        with pytest.raises(ValueError, match=words):
            jc.restore_checkpoint(path, like)
    path.write_bytes(whole.replace(np.ones(9).tobytes(), np.zeros(9).tobytes(), 1))
    with pytest.raises(ValueError, match=rf"{words}: \['w'\] cannot be read"):
        jc.restore_checkpoint(path, like)
    np.savez(path, leaf0=np.ones(3))
    with pytest.raises(ValueError, match=words):
        jc.restore_checkpoint(path, like)
    os.mkfifo(tmp_path / "pipe")
    for other in (tmp_path / "pipe", tmp_path, "/dev/zero"):  # which has no end
        with pytest.raises(ValueError, match="of jaxcoll: it is not a regular file"):
            jc.restore_checkpoint(other, like)
    with pytest.raises(FileNotFoundError):
        jc.restore_checkpoint(tmp_path / "none.npz", like)


def test_links_stay_devices_are_refused(tmp_path):
    (tmp_path / "disk").mkdir()
    link, real = tmp_path / "link.npz", tmp_path / "disk" / "real.npz"
    link.symlink_to(real)
    save_newest(link, {"w": np.ones(1)}, Stamp(5, 1), 1.0)
    assert save_newest(real, {"w": np.ones(1)}, Stamp(4, 1), 1.0) == Stamp(5, 1)
    assert link.is_symlink()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="it is not a regular file"):
        jc.save_checkpoint(tmp_path / "pipe", {"w": np.ones(3)})
    assert {p.name for p in tmp_path.iterdir()} == {"link.npz", "disk", "pipe"}
    assert {p.name for p in real.parent.iterdir()} == {".real.npz-lock", "real.npz"}


def write_halfway(folder):
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(OSError):
        patch.setattr(np.lib.format, "write_array", full)
        jc.save_checkpoint(folder / "last.npz", TREE)


def log(folder):
    with contextlib.ExitStack() as at_end:
        for file in launch._logs(folder, 2, at_end):
            file.write(b"a line")


def listen(folder):
    """Another system's proxy has a socket in a folder, and removes it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "platform", "darwin")
        CoordinatorProxy("127.0.0.1:1", 1.0).close()


TREE = {"w": np.ones(3)}
WRITERS = (
    *(write_halfway, log, listen, lambda folder: os.rmdir(make_socket_folder("keys"))),
    lambda folder: jc.save_checkpoint(folder / "last.npz", TREE),
    *(lambda folder, k=k: save_newest(folder / "last.npz", TREE, Stamp(k, 1), 1.0) for k in (0, 1)),
)
LIKE_OURS = (
    *("jaxcoll-experiments/lock", "jaxcoll-experiments/results.csv", "jaxcoll-01234567/coordinator"),
    *(".last.npz-0123456789abcdef", ".last.npz-lock", ".last.npz.mine", ".jaxcoll-last_npz-dead.npz"),
    *("0.log", "2.log", "coordinator.log", "request.json", "answer.json"),
)  # fmt: skip


@settings(max_examples=12)
@given(st.sets(st.sampled_from(LIKE_OURS)), st.lists(st.sampled_from(WRITERS), max_size=6))
def test_users_files_survive(names, writers):
    """Whatever they are called: nothing is removed that this process did not make."""
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        folder = Path(name)
        patch.setattr("tempfile.tempdir", name)
        for file in (folder / name for name in names):
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(b"a user's")
            os.utime(file, (0, 0))
        for writer in writers:
            writer(folder)
        assert all((folder / name).read_bytes().startswith(b"a user's") for name in names)
        left = {path.name for path in folder.iterdir()} - {name.split("/")[0] for name in names}
        assert left <= {"last.npz", ".last.npz-lock", "0.log", "1.log", "coordinator.log"}


def test_partial_file_takes_free_name(tmp_path, monkeypatch):
    taken = tmp_path / ".last.npz-0123456789abcdef"
    taken.write_bytes(b"a user's")
    monkeypatch.setattr("secrets.token_hex", lambda n: "0123456789abcdef")
    with pytest.raises(FileExistsError):
        jc.save_checkpoint(tmp_path / "last.npz", {"w": np.ones(3)}, step=3)
    assert taken.read_bytes() == b"a user's"


STAMPS = [Stamp(20, 1), Stamp(40, 1), Stamp(40, 2), Stamp(60, 2)]


@pytest.mark.parametrize("order", [*itertools.permutations(range(4))][::5], ids=str)
def test_newest_checkpoint_stays(tmp_path, order):
    path = tmp_path / "last.npz"
    for k, i in enumerate(order):
        stands = save_newest(path, {"w": np.full(3, i)}, STAMPS[i], 1.0)
        newest = max(order[: k + 1])
        assert stands == read_stamp(path) == STAMPS[newest]
        tree, at = jc.restore_checkpoint(path, {"w": np.ones(3, int)})
        assert (tree["w"].tolist(), at) == ([newest] * 3, STAMPS[newest].step)


def test_stopped_writer_keeps_the_lock(tmp_path, monkeypatch):
    path, replace, inside, goes_on = tmp_path / "last.npz", os.replace, Event(), Event()

    def stopped(partial, file):
        monkeypatch.setattr(os, "replace", replace)
        inside.set()
        goes_on.wait(20)
        replace(partial, file)

    monkeypatch.setattr(os, "replace", stopped)
    old = Thread(target=save_newest, args=(path, {"w": np.zeros(1)}, Stamp(20, 1), 1.0))
    old.start()
    assert inside.wait(20)
    with pytest.raises(OSError, match=r"another process has held this lock for 0\.1 s") as e:
        save_newest(path, {"w": np.ones(1)}, Stamp(60, 2), 0.1)
    assert "after step 60 could not be written" in e.value.__notes__[0]
    new = Thread(target=save_newest, args=(path, {"w": np.ones(1)}, Stamp(60, 2), 20.0))
    new.start()
    goes_on.set()
    old.join(20)
    new.join(20)
    assert read_stamp(path) == Stamp(60, 2)


def test_unreadable_checkpoint_stays(tmp_path, monkeypatch):
    path = tmp_path / "last.npz"
    save_newest(path, {"w": np.ones(1)}, Stamp(60, 2), 1.0)
    with monkeypatch.context() as disk:
        disk.setattr(checkpoint, "read_stamp", full)
        with pytest.raises(OSError, match="No space left"):
            save_newest(path, {"w": np.zeros(1)}, Stamp(20, 1), 1.0)
        disk.undo()
        disk.setattr(checkpoint.zipfile, "ZipFile", full)
        with pytest.raises(OSError, match="No space left"):
            read_stamp(path)
    assert read_stamp(path) == Stamp(60, 2)
    path.write_bytes(b"half a checkpoi")
    assert read_stamp(path) == read_stamp(tmp_path / "none.npz") == Stamp(-1, 0)


def test_killed_holder_frees_the_lock(tmp_path):
    path = tmp_path / "last.npz"
    holds = (
        "import sys, time; from pathlib import Path; from jaxcoll._train.elastic import checkpoint\n"
        "with checkpoint._lock_beside(Path(sys.argv[1]), 1.0): Path('held').touch(); time.sleep(600)"
    )
    files = [tmp_path / name for name in ("out", "err")]
    other = forks.with_jaxcoll().start(holds, ("", path), dict(os.environ), *files, tmp_path)
    while not (tmp_path / "held").exists():
        assert other.poll() is None, files[1].read_text()
    with pytest.raises(TimeoutError, match="is it stopped"), checkpoint._lock_beside(path, 0.1):
        pass
    os.kill(other.pid, signal.SIGKILL)
    with checkpoint._lock_beside(path, 20.0):
        pass


def test_missing_locks_are_tolerated(tmp_path, monkeypatch):
    monkeypatch.setattr("fcntl.flock", full)
    for step in (1, 2):
        save_newest(tmp_path / "last.npz", {"w": np.ones(1)}, Stamp(step, 1), 1.0)
    assert read_stamp(tmp_path / "last.npz") == Stamp(2, 1)
