"""Checkpoint files: a pytree is written completely or not at all, and read without unpickling."""

from __future__ import annotations

import contextlib
import errno
import json
import operator
import os
import secrets
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxcoll._compat.settings import boundary
from jaxcoll._mesh.shard_arrays import cut_like, joined, whole_shapes
from jaxcoll._plan.checks import kind_of
from jaxcoll._spmd.shards import Shards, is_shards

_ABOUT, _FORMAT = "about.json", "jaxcoll checkpoint 1"
# Raised by NumPy and zipfile for a file that is cut off, or not a checkpoint.
_BAD_FILE = (zipfile.BadZipFile, KeyError, EOFError, TypeError, AttributeError, ValueError)


class Stamp(NamedTuple):
    """The place of a state in its run: the greater of two is the newer."""

    step: int  # finished steps
    term: int  # counts generations over all runs, so that a repeated step has a later one


def save_checkpoint(path: str | Path, tree: Any, *, step: int = 0) -> None:
    """Write a pytree of arrays into one file, which is replaced in one step.

    A process that is killed, or a disk that is full, leaves the checkpoint that was there. Every
    dtype of NumPy's numbers and of `ml_dtypes`, and typed random keys, are read back bit by bit.

    Args:
      path: the file; its folder is made. It is an `.npz` that `numpy.load` reads.
      tree: a pytree of host arrays, or of `jax.Array`s that this process has whole. `Shards` are
        written as the tree that they are the parts of, which does not show how many there were;
        where several processes hold them, all call `jc.unshard` first, and one saves its result.
      step: a number kept with it.

    Raises:
      ValueError: this process does not hold all of a leaf, or a leaf is not an array of numbers; or
        `step` is not a whole number.
      ProgramMismatchError: processes ran different programs, so that the tree is wrong.
      OSError: it cannot be written; the file that was there still is.

    Examples:
      >>> import tempfile, numpy as np
      >>> folder = tempfile.TemporaryDirectory()
      >>> save_checkpoint(f"{folder.name}/last.npz", {"w": np.arange(3.0)}, step=7)
      >>> restored, step = restore_checkpoint(f"{folder.name}/last.npz", {"w": np.zeros(3)})
      >>> restored["w"].tolist(), step
      ([0.0, 1.0, 2.0], 7)
      >>> folder.cleanup()
    """
    try:
        step = operator.index(step)
    except TypeError:
        raise ValueError(f"`step` must be a whole number; got {step!r}.") from None
    if not isinstance(path, str | os.PathLike):
        raise ValueError(
            "`save_checkpoint` takes the path first, as in `jc.save_checkpoint(path, state)`; got "
            f"{kind_of(path)} for it."
        )
    _write(Path(path), tree, Stamp(step, 0), os.replace)


def save_newest(path: Path, tree: Any, stamp: Stamp, patience: float) -> Stamp:
    """Write a checkpoint of an elastic run, unless a newer one is there; return the file's stamp.

    Of two writers the one with the later stamp prevails, whenever each of them writes: a process
    that was stopped and wakes hours later compares before it replaces, under a lock.
    """
    stamps = [stamp]

    def replace_older(partial: Path, file: Path) -> None:
        with _locked(file, patience):
            stamps.append(stamp_of_checkpoint(file))
            if stamps[-1] < stamp:
                os.replace(partial, file)

    _write(path, tree, stamp, replace_older)
    return max(stamps)


def _write(path: Path, tree: Any, stamp: Stamp, replace: Callable[[Path, Path], None]) -> None:
    leaves = {name: _stored(name, leaf) for name, leaf in _named(tree, _whole).items()}
    entries = {name: entry for name, (entry, _) in leaves.items()}
    about = {"format": _FORMAT, **stamp._asdict(), "leaves": entries}
    file = Path(os.path.realpath(path))  # a link stays
    partial = file.with_name(f".{file.name[:150]}-{secrets.token_hex(8)}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.exists() and not file.is_file():
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        with contextlib.ExitStack() as at_end:
            with partial.open("xb") as out, zipfile.ZipFile(out, "w") as archive:
                at_end.callback(partial.unlink, missing_ok=True)
                archive.writestr(_ABOUT, json.dumps(about))
                # By number: a key of a tree may not be possible as a file's name.
                for i, (_, array) in enumerate(leaves.values()):
                    with archive.open(f"leaf{i}.npy", "w", force_zip64=True) as member:
                        np.lib.format.write_array(member, array, allow_pickle=False)
                archive.close()
                out.flush()
                os.fsync(out.fileno())
            replace(partial, file)
    except OSError as error:
        error.add_note(
            f"jaxcoll: the checkpoint after step {stamp.step} could not be written to {path}; what "
            "stood there before still does."
        )
        raise


@contextlib.contextmanager
def _locked(path: Path, seconds: float) -> Iterator[None]:
    """Hold a lock that others wait for, on any host, and that the system frees with a process.

    It is on a file beside `path`, which stays: were it removed, two could hold a lock of that name.

    Raises:
      TimeoutError: another process held it for longer than so many seconds.
    """
    import fcntl  # not on Windows, where no elastic run is

    with path.with_name(f".{path.name[:150]}-lock").open("a") as beside:
        until = time.monotonic() + seconds
        while True:
            try:
                fcntl.flock(beside, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    words = f"another process has held this lock for {seconds:g} s; is one stopped?"
                    raise TimeoutError(errno.ETIMEDOUT, words, beside.name) from None
                time.sleep(0.02)
            except OSError:  # this file system has none: Lustre can be mounted so
                break
        try:
            yield
        finally:  # a child that was forked meanwhile has the file open, too
            with contextlib.suppress(OSError):
                fcntl.flock(beside, fcntl.LOCK_UN)


@boundary
def restore_checkpoint(path: str | Path, like: Any) -> tuple[Any, int]:
    """Read what `save_checkpoint` wrote. Nothing is unpickled.

    Args:
      path: the file.
      like: a pytree of arrays or `jax.ShapeDtypeStruct`s that it must match in structure, shapes
        and dtypes. A `Shards` in it, of any number of replicas, stands for the tree that it is made
        of, wherever that was written from.

    Returns:
      A tree like it, of host arrays, and the step. `Shards` are cut as those of `like`, and lie
      where they do: each device gets its own part alone.

    Raises:
      FileNotFoundError: there is none.
      ValueError: it is not a complete checkpoint, or holds another tree; the leaf is named.
    """
    path, at = Path(path), "the file"
    wanted = _named(like, whole_shapes)
    if path.exists() and not path.is_file():  # a device can be read for ever
        raise ValueError(f"{path} is not a checkpoint of jaxcoll: it is not a regular file.")
    with path.open("rb") as file:
        try:
            archive = zipfile.ZipFile(file)
            about = json.loads(archive.read(_ABOUT))
            if about["format"] != _FORMAT:
                raise ValueError(f"its format is {about['format']}")
            entries, arrays = about["leaves"], {}
            different = _difference(entries, wanted)
            for i, at in enumerate(entries if not different else ()):
                with archive.open(f"leaf{i}.npy") as member:
                    arrays[at] = _read(np.lib.format.read_array(member), *entries[at])
        except _BAD_FILE as error:
            text = f"{path} is not a complete checkpoint of jaxcoll: {at} cannot be read"
            raise ValueError(f"{text} ({type(error).__name__}: {error}).") from error
    if different:
        raise ValueError(f"{path}: {different}.")
    # The names are equal, but perhaps in another order: of a dict built otherwise, say.
    leaves = iter([arrays[name] for name in wanted])
    nodes, structure = jax.tree.flatten(like, is_leaf=is_shards)
    return jax.tree.unflatten(structure, [_like(node, leaves) for node in nodes]), about["step"]


def stamp_of_checkpoint(path: Path) -> Stamp:
    """Return the stamp of the state in a file; step -1: there is no complete checkpoint."""
    try:
        with zipfile.ZipFile(path) as archive:
            about = json.loads(archive.read(_ABOUT))
            return Stamp(int(about["step"]), int(about.get("term", 0)))
    except (FileNotFoundError, *_BAD_FILE):
        return Stamp(-1, 0)


def on_host(name: str, leaf: Any) -> np.ndarray:
    """Return a leaf of a state as a host array, if it is complete here, and of numbers."""
    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        raise ValueError(
            f"state{name} is a typed random key, whose bits JAX keeps to itself: hold "
            "`jax.random.key_data(key)` in the state, and `jax.random.wrap_key_data` in the step."
        )
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        if not leaf.is_fully_replicated:
            raise ValueError(
                f"state{name} is sharded over processes, so that no other has a copy. A state must "
                "be whole on every worker."
            )
        return np.asarray(leaf.addressable_data(0))
    array = np.asarray(leaf)
    is_number = array.dtype.kind in "biufc" or _is_added(array.dtype)
    if not is_number or isinstance(leaf, np.ma.MaskedArray):
        raise ValueError(
            f"state{name} is not an array of numbers: got {type(leaf).__name__} ({array.dtype})."
        )
    return array


def _is_added(dtype: np.dtype) -> bool:
    """Return whether a dtype is one of `ml_dtypes`, which NumPy writes and cannot read."""
    return dtype.isbuiltin == 2


def _stored(name: str, leaf: Any) -> tuple[list[Any], np.ndarray]:
    """Return a leaf's dtype, shape and kind of key, and an array that NumPy can write and read."""
    entry = [_dtype(leaf), list(np.shape(leaf))]
    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        entry.append(str(jax.random.key_impl(leaf)))
        leaf = jax.random.key_data(leaf)
    array = np.ascontiguousarray(on_host(name, leaf))
    return entry, array.reshape(-1).view(np.uint8) if _is_added(array.dtype) else array


def _read(array: np.ndarray, dtype: str, shape: list[int], impl: str = "") -> Any:
    if impl:
        return jax.random.wrap_key_data(jax.numpy.asarray(array), impl=impl)
    return array.view(np.dtype(dtype)).reshape(shape)


def _dtype(leaf: Any) -> str:
    return str(getattr(leaf, "dtype", None) or np.asarray(leaf).dtype)


def _difference(entries: dict[str, list[Any]], wanted: dict[str, Any]) -> str:
    """Say how the tree in a file differs from the one that is wanted; "": it does not."""
    lacks = ", ".join(name for name in wanted if name not in entries)
    has = ", ".join(name for name in entries if name not in wanted)
    if lacks or has:
        has = has or "nothing"
        return f"it holds another tree: it lacks {lacks or 'nothing'}, and has {has} beside"
    for name, leaf in wanted.items():
        (dtype, shape), want = entries[name][:2], (_dtype(leaf), list(np.shape(leaf)))
        if (dtype, shape) != want:
            expected = f"{want[0]}{want[1]} is expected"
            return f"the leaf {name} is {dtype}{shape} in the file, and {expected}"
    return ""


def _named(tree: Any, whole: Callable[[Shards], Any]) -> dict[str, Any]:
    """Return every leaf by its path, `Shards` as the tree that `whole` makes of them."""
    leaves: dict[str, Any] = {}
    for path, node in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_shards)[0]:
        inner = whole(node) if is_shards(node) else node
        for within, leaf in jax.tree_util.tree_flatten_with_path(inner)[0]:
            name = jax.tree_util.keystr((*path, *within))
            if name in leaves:
                raise ValueError(
                    f"two leaves of the tree are called {name}, and a checkpoint would hold one of "
                    "them: give the children of that class different keys where it is registered."
                )
            leaves[name] = leaf
    return leaves


def _whole(shards: Shards) -> Any:
    """Return the tree of shards that this process holds all of."""
    if not all(x.is_fully_addressable for x in shards.parts if isinstance(x, jax.Array)):
        raise ValueError(
            "`save_checkpoint`: the tree holds `Shards` of which other processes hold parts. "
            "Call `whole = jc.unshard(tree)` in all processes, which brings them together, and "
            "save `whole` in one; `restore_checkpoint` cuts it again."
        )
    return joined(shards)


def _like(node: Any, leaves: Iterator[Any]) -> Any:
    """Return the next leaf; or, for Shards, the next ones, cut as they are."""
    if not is_shards(node):
        return next(leaves)
    own = [next(leaves) for _ in node.layout.leaves]
    return cut_like(own, node) if node.parts else node
