"""A checkpoint is whole or not there, and holds what was put in, to the bit."""

import errno
import os
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcoll as jc
from jaxcoll import _files as files


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
    with pytest.raises(ValueError, match="is no whole checkpoint of jaxcoll"):
        jc.restore_checkpoint(path, {"w": np.ones(1000)})
    np.savez(path, leaf0=np.ones(3))
    with pytest.raises(ValueError, match="is no whole checkpoint of jaxcoll"):
        jc.restore_checkpoint(path, {"w": np.ones(3)})
    path.write_text("words, which NumPy takes for a pickle")
    with pytest.raises(ValueError, match=r"is no whole checkpoint of jaxcoll \(BadZipFile"):
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


def test_what_cannot_be_held_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"state\['k'\] is a typed random key"):
        jc.save_checkpoint(tmp_path / "c.npz", {"k": jax.random.key(0)})
    with pytest.raises(ValueError, match=r"state\['s'\] is no array of numbers: got str"):
        jc.save_checkpoint(tmp_path / "c.npz", {"s": "words"})
    with pytest.raises(ValueError, match="is no array of numbers: got ndarray"):
        jc.save_checkpoint(tmp_path / "c.npz", {"s": np.zeros(1, [("x", "f4")])})
    with pytest.raises(ValueError, match=r"`step` must be a whole number; got 1\.5"):
        jc.save_checkpoint(tmp_path / "c.npz", {}, step=1.5)
