"""A checkpoint is whole or not there, and holds what was put in, to the bit."""

import errno
import itertools
import os
import subprocess
import sys
import time
from threading import Event, Thread

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcoll as jc
from jaxcoll import _files as files
from jaxcoll._elastic import checkpoint
from jaxcoll._elastic.checkpoint import Stamp, save_newest, stamp_of_checkpoint


def tree():
    return {
        "a/b": np.arange(6, dtype="f").reshape(2, 3),
        "half": [jnp.array([1.0, -0.0, jnp.nan], jnp.bfloat16), np.float64(0.1)],
        "empty": np.zeros((0, 3), np.int8),
        "on": np.array(True),
        "z": np.array([1 + 2j], np.complex64),
    }


def test_it_comes_back_to_the_bit_and_numpy_reads_it(tmp_path):
    path = tmp_path / "deep" / "last.npz"
    jc.save_checkpoint(path, tree(), step=12)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype), tree())
    back, step = jc.restore_checkpoint(str(path), like)
    assert step == 12
    for got, want in zip(jax.tree.leaves(back), jax.tree.leaves(tree()), strict=True):
        assert got.dtype == want.dtype
        assert got.shape == np.shape(want)
        assert got.tobytes() == np.asarray(want).tobytes()
    with np.load(path, allow_pickle=False) as archive:
        np.testing.assert_array_equal(archive["leaf0"], tree()["a/b"])


class Pair:
    """Both children under one key, as a careless registration has them."""

    def __init__(self, *children):
        self.children = children


jax.tree_util.register_pytree_with_keys(
    Pair,
    lambda pair: ([(jax.tree_util.GetAttrKey("x"), child) for child in pair.children], None),
    lambda _, children: Pair(*children),
)


def test_leaves_of_one_name_are_refused_before_one_of_them_is_lost(tmp_path):
    with pytest.raises(ValueError, match=r"two leaves of the tree are called \['pair'\].x"):
        jc.save_checkpoint(tmp_path / "last.npz", {"pair": Pair(np.ones(2), np.zeros(3))})
    assert not [*tmp_path.iterdir()]


def test_a_full_disk_keeps_the_last_good_one(tmp_path, monkeypatch):
    path = tmp_path / "last.npz"
    jc.save_checkpoint(path, {"w": np.ones(3)}, step=1)

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files, "_to_disk", full)
    with pytest.raises(OSError, match="No space left") as e:
        jc.save_checkpoint(path, {"w": np.zeros(3)}, step=2)
    assert "after step 2 could not be written" in e.value.__notes__[0]
    assert jc.restore_checkpoint(path, {"w": np.ones(3)})[1] == 1
    assert [p.name for p in tmp_path.iterdir()] == ["last.npz"]


@pytest.mark.parametrize(
    ("like", "words"),
    [
        ({"w": np.ones(3, "f"), "b": np.ones(1)}, r"another tree: it lacks \['b'\], and has nothing"),
        ({}, r"it lacks nothing, and has \['w'\]"),
        ({"w": np.ones(4, "f")}, r"the leaf \['w'\] is float32\[3\] in the file, and float32\[4\] is expected"),
        ({"w": np.ones(3, "i")}, r"float32\[3\] in the file, and int32\[3\] is expected"),
    ],
)  # fmt: skip
def test_another_tree_is_refused(tmp_path, like, words):
    jc.save_checkpoint(tmp_path / "c.npz", {"w": np.ones(3, "f")})
    with pytest.raises(ValueError, match=words):
        jc.restore_checkpoint(tmp_path / "c.npz", like)


def test_what_is_no_whole_checkpoint_is_refused(tmp_path):
    path = tmp_path / "c.npz"
    jc.save_checkpoint(path, {"w": np.ones(1000)})
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(ValueError, match="is not a complete checkpoint of jaxcoll"):
        jc.restore_checkpoint(path, {"w": np.ones(1000)})
    np.savez(path, leaf0=np.ones(3))
    with pytest.raises(ValueError, match="is not a complete checkpoint of jaxcoll"):
        jc.restore_checkpoint(path, {"w": np.ones(3)})
    os.mkfifo(tmp_path / "pipe")
    for other in (tmp_path / "pipe", tmp_path, "/dev/zero"):  # which has no end
        with pytest.raises(ValueError, match="of jaxcoll: it is not a regular file"):
            jc.restore_checkpoint(other, {"w": np.ones(3)})
    path.write_text("words, which NumPy takes for a pickle")
    with pytest.raises(ValueError, match=r"is not a complete checkpoint of jaxcoll \(BadZipFile"):
        jc.restore_checkpoint(path, {"w": np.ones(3)})
    with pytest.raises(FileNotFoundError):
        jc.restore_checkpoint(tmp_path / "none.npz", {"w": np.ones(3)})


def test_what_writers_left_that_died_is_removed_and_what_others_write_is_not(tmp_path):
    path = tmp_path / "of [run] 1.npz"
    left, written, other, users = (
        tmp_path / name
        for name in (
            ".jaxcoll-of [run] 1_npz-dead.npz",
            ".jaxcoll-of [run] 1_npz-lives.npz",
            ".jaxcoll-of r 1_npz-dead.npz",
            ".of [run] 1.npz.mine.npz",
        )
    )
    for file in (left, written, other, users):
        file.write_bytes(b"half a checkpoi")
    for file in (left, other, users):
        os.utime(file, (0, time.time() - files.STALE_SECONDS - 60))
    jc.save_checkpoint(path, tree())
    assert set(tmp_path.iterdir()) == {path, written, other, users}


STAMPS = [Stamp(20, 1), Stamp(40, 1), Stamp(40, 2), Stamp(60, 2)]


@pytest.mark.parametrize("order", [*itertools.permutations(range(4))], ids=str)
def test_the_newest_of_an_elastic_run_stays_in_whatever_order_they_are_written(tmp_path, order):
    path = tmp_path / "last.npz"
    for k, i in enumerate(order):
        stands = save_newest(path, {"w": np.full(3, i)}, STAMPS[i], 1.0)
        newest = max(order[: k + 1])
        assert stands == stamp_of_checkpoint(path) == STAMPS[newest]
        tree, at = jc.restore_checkpoint(path, {"w": np.ones(3, int)})
        assert (tree["w"].tolist(), at) == ([newest] * 3, STAMPS[newest].step)


def test_who_is_stopped_between_its_last_look_and_its_rename_keeps_others_from_writing(
    tmp_path, monkeypatch
):
    path, put, inside, goes_on = tmp_path / "last.npz", files.put, Event(), Event()

    def stopped(partial, file):
        monkeypatch.setattr(checkpoint, "put", put)
        inside.set()
        goes_on.wait(20)
        put(partial, file)

    monkeypatch.setattr(checkpoint, "put", stopped)
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
    assert stamp_of_checkpoint(path) == Stamp(60, 2)


def test_what_cannot_be_read_may_be_newer_and_stays(tmp_path, monkeypatch):
    path = tmp_path / "last.npz"
    save_newest(path, {"w": np.ones(1)}, Stamp(60, 2), 1.0)

    def fails(*args):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as disk:
        disk.setattr(checkpoint, "stamp_of_checkpoint", fails)
        with pytest.raises(OSError, match="Input/output error"):
            save_newest(path, {"w": np.zeros(1)}, Stamp(20, 1), 1.0)
        disk.undo()
        disk.setattr(checkpoint.zipfile, "ZipFile", fails)
        with pytest.raises(OSError, match="Input/output error"):
            stamp_of_checkpoint(path)
    assert stamp_of_checkpoint(path) == Stamp(60, 2)
    path.write_bytes(b"half a checkpoi")
    assert stamp_of_checkpoint(path) == stamp_of_checkpoint(tmp_path / "none.npz") == Stamp(-1, 0)


def test_a_lock_is_free_when_its_holder_is_killed(tmp_path):
    path = tmp_path / "last.npz"
    holds = "import sys; from pathlib import Path; from jaxcoll._files import locked\n"
    holds += "with locked(Path(sys.argv[1]), 1.0): print('has it', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", holds, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout.readline() == b"has it\n"
        with pytest.raises(TimeoutError, match="is one stopped"), files.locked(path, 0.1):
            pass
        other.kill()
        with files.locked(path, 20.0):
            pass


def test_where_there_are_no_locks_it_says_so_once_and_writes(tmp_path, monkeypatch, caplog):
    def none(handle, how):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(files.fcntl, "flock", none)
    path = tmp_path / "last.npz"
    for step in (1, 2):
        save_newest(path, {"w": np.ones(1)}, Stamp(step, 1), 1.0)
    assert stamp_of_checkpoint(path) == Stamp(2, 1)
    assert ["has no file locks" in record.getMessage() for record in caplog.records] == [True]
    monkeypatch.setattr(files, "fcntl", None)
    save_newest(path, {"w": np.ones(1)}, Stamp(3, 1), 1.0)
    assert stamp_of_checkpoint(path) == Stamp(3, 1)


def test_a_link_and_what_it_points_to_have_one_lock(tmp_path):
    (tmp_path / "disk").mkdir()
    link, real = tmp_path / "last.npz", tmp_path / "disk" / "real.npz"
    link.symlink_to(real)
    save_newest(link, {"w": np.ones(1)}, Stamp(5, 1), 1.0)
    assert save_newest(real, {"w": np.ones(1)}, Stamp(4, 1), 1.0) == Stamp(5, 1)
    assert link.is_symlink()
    assert sorted(p.name for p in real.parent.iterdir()) == [".real.npz-lock", "real.npz"]


def test_what_cannot_be_held_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"state\['k'\] is a typed random key"):
        jc.save_checkpoint(tmp_path / "c.npz", {"k": jax.random.key(0)})
    with pytest.raises(ValueError, match=r"state\['s'\] is not an array of numbers: got str"):
        jc.save_checkpoint(tmp_path / "c.npz", {"s": "words"})
    with pytest.raises(ValueError, match="is not an array of numbers: got ndarray"):
        jc.save_checkpoint(tmp_path / "c.npz", {"s": np.zeros(1, [("x", "f4")])})
    with pytest.raises(ValueError, match=r"`step` must be a whole number; got 1\.5"):
        jc.save_checkpoint(tmp_path / "c.npz", {}, step=1.5)
