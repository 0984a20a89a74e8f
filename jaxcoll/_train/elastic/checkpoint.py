"""Checkpoint files: pytrees written completely or not at all, and read without unpickling."""

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

from jaxcoll._collectives.shards import Shards, is_shards
from jaxcoll._compat.axes import make_weak
from jaxcoll._compat.settings import boundary
from jaxcoll._job.timing import POLL_SECONDS
from jaxcoll._plan.checks import describe_type
from jaxcoll._plan.packs.leaves import is_key
from jaxcoll._step.mesh.shard_arrays import cut_like, join_shards, whole_shapes

_ABOUT, _FORMAT = "about.json", "jaxcoll checkpoint 1"
# Raised by NumPy and zipfile for a file that is truncated, or not a checkpoint.
_BAD_FILE = (zipfile.BadZipFile, KeyError, EOFError, TypeError, AttributeError, ValueError)


class Stamp(NamedTuple):
    """The age of a state: the greater of two stamps is the newer."""

    step: int  # number of finished steps
    term: int  # number of generations in all runs, so that a repeated step has a later stamp


def save_checkpoint(path: str | Path, tree: Any, *, step: int = 0) -> None:
    """Write a pytree of arrays into one file, and replace an older file atomically.

    If the process is killed, or the disk is full, the old checkpoint stays. All numeric dtypes of
    NumPy and `ml_dtypes`, and typed random keys, are restored bit by bit; Python numbers, NumPy
    scalars and weakly typed arrays as what they were.

    Args:
      path: the file, an `.npz` that `numpy.load` reads. Its folder is created if necessary.
      tree: a pytree of host arrays, or of `jax.Array`s that are complete in this process. `Shards`
        are written as the whole tree, independent of the number of shards; if several processes
        hold them, all call `jc.unshard` first, and one saves the result.
      step: a number saved with the tree.

    Raises:
      ValueError: a leaf is not complete in this process, or not an array of numbers; or `step` is
        not a whole number.
      ProgramMismatchError: processes ran different programs, so the tree is wrong.
      OSError: the file cannot be written; the old file is still there.

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
            f"{describe_type(path)}."
        )
    _write(Path(path), tree, Stamp(step, 0), os.replace)


def save_newest(path: Path, tree: Any, stamp: Stamp, patience: float) -> Stamp:
    """Write a checkpoint of an elastic run, unless the file has a newer one; return its stamp.

    The later stamp wins, whatever the order of writing: each writer compares stamps under a lock,
    even a process that was stopped for hours.
    """
    stamps = [stamp]

    def replace_older(partial: Path, file: Path) -> None:
        with _lock_beside(file, patience):
            stamps.append(read_stamp(file))
            if stamps[-1] < stamp:
                os.replace(partial, file)

    _write(path, tree, stamp, replace_older)
    return max(stamps)


def _write(path: Path, tree: Any, stamp: Stamp, replace: Callable[[Path, Path], None]) -> None:
    named = _name_leaves(tree, _whole)
    leaves = {name: _encode(name, leaf) for name, leaf in named.items()}
    entries = {name: entry for name, (entry, _) in leaves.items()}
    kinds = {name: kind for name, leaf in named.items() if (kind := _kind(leaf))}
    about = {"format": _FORMAT, **stamp._asdict(), "leaves": entries, "kinds": kinds}
    file = Path(os.path.realpath(path))  # keep a symbolic link
    partial = file.with_name(f".{file.name[:150]}-{secrets.token_hex(8)}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.exists() and not file.is_file():
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        with contextlib.ExitStack() as at_end:
            with partial.open("xb") as out, zipfile.ZipFile(out, "w") as archive:
                at_end.callback(partial.unlink, missing_ok=True)
                archive.writestr(_ABOUT, json.dumps(about))
                # By number, because a key of a tree may be no valid file name.
                for i, (_, array) in enumerate(leaves.values()):
                    with archive.open(f"leaf{i}.npy", "w", force_zip64=True) as member:
                        np.lib.format.write_array(member, array, allow_pickle=False)
                archive.close()
                out.flush()
                os.fsync(out.fileno())
            replace(partial, file)
    except OSError as error:
        error.add_note(
            f"jaxcoll: the checkpoint after step {stamp.step} could not be written to {path}; the "
            "old file, if there was one, is unchanged."
        )
        raise


@contextlib.contextmanager
def _lock_beside(path: Path, seconds: float) -> Iterator[None]:
    """Hold a lock against processes on all hosts. The operating system frees it if this one ends.

    The lock file beside `path` stays: if it were removed, two processes could hold one lock.

    Raises:
      TimeoutError: another process held the lock for longer than `seconds`.
    """
    import fcntl  # missing on Windows, which has no elastic runs

    with path.with_name(f".{path.name[:150]}-lock").open("a") as beside:
        until = time.monotonic() + seconds
        while True:
            try:
                fcntl.flock(beside, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    text = f"another process has held this lock for {seconds:g} s; is it stopped?"
                    raise TimeoutError(errno.ETIMEDOUT, text, beside.name) from None
                time.sleep(POLL_SECONDS)
            except OSError:  # the file system has no locks, such as Lustre with some mount options
                break
        try:
            yield
        finally:  # unlock, because a child forked meanwhile also has the file open
            with contextlib.suppress(OSError):
                fcntl.flock(beside, fcntl.LOCK_UN)


@boundary
def restore_checkpoint(path: str | Path, like: Any) -> tuple[Any, int]:
    """Read what `save_checkpoint` wrote. Nothing is unpickled.

    Args:
      path: the file.
      like: a pytree of arrays or `jax.ShapeDtypeStruct`s with the structure, shapes and dtypes of
        the saved tree; a weakly typed leaf may be a Python number in one of them. `Shards` in it,
        of any number of replicas, match the whole tree that they are shards of, however that was
        saved.

    Returns:
      The tree and the step. Its leaves are host arrays, or what was saved of Python numbers, NumPy
      scalars and weakly typed arrays. `Shards` have the layout and devices of those in `like`; each
      device gets only its own part.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: the file is not a complete checkpoint, or holds another tree. The leaf is named.
    """
    path, at = Path(path), "the file"
    wanted = _name_leaves(like, whole_shapes)
    if path.exists() and not path.is_file():  # reading a device might never end
        raise ValueError(f"{path} is not a checkpoint of jaxcoll: it is not a regular file.")
    with path.open("rb") as file:
        try:
            archive = zipfile.ZipFile(file)
            about = json.loads(archive.read(_ABOUT))
            if about["format"] != _FORMAT:
                raise ValueError(f"its format is {about['format']}")
            entries, arrays = about["leaves"], {}
            # Files of older versions do not say what the leaves were.
            kinds = about.get("kinds", {name: _kind(leaf) for name, leaf in wanted.items()})
            different = _difference(entries, wanted, kinds)
            for i, at in enumerate(entries if not different else ()):
                with archive.open(f"leaf{i}.npy") as member:
                    array = _decode(np.lib.format.read_array(member), *entries[at])
                    arrays[at] = _restore_kind(array, kinds.get(at, ""))
        except _BAD_FILE as error:
            text = f"{path} is not a complete checkpoint of jaxcoll: {at} cannot be read"
            raise ValueError(f"{text} ({type(error).__name__}: {error}).") from error
    if different:
        raise ValueError(f"{path}: {different}.")
    # The names are equal, but may have another order, as in a dict built differently.
    leaves = iter([arrays[name] for name in wanted])
    nodes, structure = jax.tree.flatten(like, is_leaf=is_shards)
    return jax.tree.unflatten(structure, [_like(node, leaves) for node in nodes]), about["step"]


def read_stamp(path: Path) -> Stamp:
    """Read the stamp of a checkpoint; its step is -1 if there is no complete checkpoint."""
    try:
        with zipfile.ZipFile(path) as archive:
            about = json.loads(archive.read(_ABOUT))
            return Stamp(int(about["step"]), int(about.get("term", 0)))
    except (FileNotFoundError, *_BAD_FILE):
        return Stamp(-1, 0)


def copy_to_host(name: str, leaf: Any) -> np.ndarray:
    """Copy a leaf of a state into a host array; it must be numeric and complete here."""
    if isinstance(leaf, jax.Array) and is_key(leaf):
        raise ValueError(
            f"state{name} is a typed random key, whose bits JAX hides: keep `jax.random.key_data("
            "key)` in the state, and call `jax.random.wrap_key_data` in the step."
        )
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        if not leaf.is_fully_replicated:
            raise ValueError(
                f"state{name} is sharded over processes, so no other process has a copy of its "
                "parts. The state must be complete on every worker."
            )
        return np.asarray(leaf.addressable_data(0))
    array = np.asarray(leaf)
    is_number = array.dtype.kind in "biufc" or _is_added(array.dtype)
    if not is_number or isinstance(leaf, np.ma.MaskedArray):
        raise ValueError(
            f"state{name} must be an array of numbers; got {type(leaf).__name__} ({array.dtype})."
        )
    return array


def _is_added(dtype: np.dtype) -> bool:
    # From `ml_dtypes`: NumPy can write those but not read them.
    return dtype.isbuiltin == 2


def _encode(name: str, leaf: Any) -> tuple[list[Any], np.ndarray]:
    """Split a leaf into dtype, shape and key type, and an array that NumPy can write and read."""
    entry = [_dtype(leaf), list(np.shape(leaf))]
    if isinstance(leaf, jax.Array) and is_key(leaf):
        entry.append(str(jax.random.key_impl(leaf)))
        leaf = jax.random.key_data(leaf)
    array = np.ascontiguousarray(copy_to_host(name, leaf))
    return entry, array.reshape(-1).view(np.uint8) if _is_added(array.dtype) else array


def _decode(array: np.ndarray, dtype: str, shape: list[int], impl: str = "") -> Any:
    if impl:
        return jax.random.wrap_key_data(jax.numpy.asarray(array), impl=impl)
    return array.view(np.dtype(dtype)).reshape(shape)


def _kind(leaf: Any) -> str:
    """Name what a leaf is besides its dtype and shape; "" for an array."""
    if isinstance(leaf, bool | int | float | complex) and not isinstance(leaf, np.generic):
        return type(leaf).__name__
    if isinstance(leaf, np.generic):
        return "scalar"
    return "weak" if getattr(leaf, "weak_type", False) else ""


def _restore_kind(array: Any, kind: str) -> Any:
    if kind == "weak":
        return make_weak(jax.numpy.asarray(array))
    if kind == "scalar":
        return array[()]
    return array.item() if kind else array


def _dtype(leaf: Any) -> str:
    return str(getattr(leaf, "dtype", None) or np.asarray(leaf).dtype)


def _difference(
    entries: dict[str, list[Any]], wanted: dict[str, Any], kinds: dict[str, str]
) -> str:
    """Describe how the tree in a file differs from the wanted one; "" if it does not."""
    missing = ", ".join(name for name in wanted if name not in entries)
    extra = ", ".join(name for name in entries if name not in wanted)
    if missing or extra:
        both = f"missing leaves: {missing or 'none'}; extra leaves: {extra or 'none'}"
        return f"the file holds another tree ({both})"
    for name, leaf in wanted.items():
        (dtype, shape), want = entries[name][:2], (_dtype(leaf), list(np.shape(leaf)))
        # NumPy takes a Python number for 64 bits, but a step may have made an array of any width.
        weak = not {kinds.get(name, ""), _kind(leaf)} <= {"", "scalar"}
        same = dtype == want[0] or (weak and np.dtype(dtype).kind == np.dtype(want[0]).kind)
        if not same or shape != want[1]:
            expected = f"but {want[0]}{want[1]} in `like`"
            return f"the leaf {name} is {dtype}{shape} in the file, {expected}"
    return ""


def _name_leaves(tree: Any, whole: Callable[[Shards], Any]) -> dict[str, Any]:
    """List all leaves by their paths, with each `Shards` replaced by the tree `whole(shards)`."""
    leaves: dict[str, Any] = {}
    for path, node in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_shards)[0]:
        inner = whole(node) if is_shards(node) else node
        for within, leaf in jax.tree_util.tree_flatten_with_path(inner)[0]:
            name = jax.tree_util.keystr((*path, *within))
            if name in leaves:
                raise ValueError(
                    f"two leaves of the tree have the path {name}, so a checkpoint could hold only "
                    "one: give the children of that class different keys where it is registered."
                )
            leaves[name] = leaf
    return leaves


def _whole(shards: Shards) -> Any:
    """Gather the tree of `Shards`; this process must hold all of them."""
    if not all(x.is_fully_addressable for x in shards.parts if isinstance(x, jax.Array)):
        raise ValueError(
            "`save_checkpoint`: other processes hold parts of the `Shards` in the tree. Call "
            "`whole = jc.unshard(tree)` in all processes to gather them, and save `whole` in one; "
            "`restore_checkpoint` shards it again."
        )
    return join_shards(shards)


def _like(node: Any, leaves: Iterator[Any]) -> Any:
    """Take the next leaf; or, for `Shards`, the next leaves, sharded like it."""
    if not is_shards(node):
        return next(leaves)
    whole = [next(leaves) for _ in node.layout.leaves]
    return cut_like(whole, node) if node.parts else node
