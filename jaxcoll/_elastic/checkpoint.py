"""Checkpoint files: a pytree is written completely or not at all, and read without unpickling."""

from __future__ import annotations

import json
import operator
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxcoll._files import locked, put, replacing
from jaxcoll._mesh.shard_arrays import cut_like, joined, whole_shapes
from jaxcoll._spmd.shards import Shards, is_shards

_ABOUT = "about.json"
_FORMAT = "jaxcoll checkpoint 1"
# What NumPy and zipfile raise for a file that is cut off, or not a checkpoint.
_BAD_FILE = (zipfile.BadZipFile, KeyError, EOFError, TypeError, AttributeError, AssertionError)


class Stamp(NamedTuple):
    """When a tree was the state of a run: the greater of two is the newer."""

    step: int  # finished steps
    term: int  # counts generations over all runs, so that a repeated step has a later one


def save_checkpoint(path: str | Path, tree: Any, *, step: int = 0) -> None:
    """Write a pytree of arrays into one file.

    Law: the file is replaced in one step, once its bytes have reached the disk. A process that is
    killed, or a disk that is full, leaves the checkpoint that was there. Nothing is written once
    processes turn out to have called programs in different orders (docs: hangs), which is asked
    before.

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
    _write(Path(path), tree, Stamp(step, 0), put)


def save_newest(path: Path, tree: Any, stamp: Stamp, patience: float) -> Stamp:
    """Write a checkpoint of an elastic run, unless a newer one is there; the file's stamp then.

    Law: of two writers the one with the later stamp prevails, whenever each of them writes: a
    process that was stopped and wakes hours later compares before it replaces, under a lock.
    """
    found = stamp

    def put_if_newer(partial: Path, file: Path) -> None:
        nonlocal found
        with locked(file, patience):
            if (before := stamp_of_checkpoint(file)) >= stamp:
                found = before
            else:
                put(partial, file)

    _write(path, tree, stamp, put_if_newer)
    return found


def _write(path: Path, tree: Any, stamp: Stamp, rename: Callable[[Path, Path], None]) -> None:
    leaves = {name: on_host(name, leaf) for name, leaf in _named(tree, _whole).items()}
    about = {
        "format": _FORMAT,
        **stamp._asdict(),
        "leaves": {name: [str(x.dtype), list(x.shape)] for name, x in leaves.items()},
    }
    try:
        with replacing(path, rename) as partial:
            # Leaves go by number: a key of a tree may not be possible as a file's name.
            parts: dict[str, Any] = {f"leaf{i}": _plain(x) for i, x in enumerate(leaves.values())}
            with partial.open("wb") as file:
                np.savez(file, **parts)
            with zipfile.ZipFile(partial, "a") as archive:
                archive.writestr(_ABOUT, json.dumps(about))
    except OSError as error:
        error.add_note(
            f"jaxcoll: the checkpoint after step {stamp.step} could not be written to {path}; what "
            "stood there before still does."
        )
        raise


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
    path = Path(path)
    wanted = _named(like, whole_shapes)
    if path.exists() and not path.is_file():  # a device can be read for ever
        raise ValueError(
            f"{path} is not a complete checkpoint of jaxcoll: it is not a regular file."
        )
    try:
        with path.open("rb") as file:
            zipfile.ZipFile(file).close()  # np.load would take other files for pickles
        with np.load(path, allow_pickle=False) as archive:
            about = json.loads(archive.zip.read(_ABOUT))
            assert about["format"] == _FORMAT, about["format"]
            _check_same(path, about["leaves"], wanted)
            held = [
                archive[f"leaf{i}"].view(np.dtype(dtype)).reshape(shape)
                for i, (dtype, shape) in enumerate(about["leaves"].values())
            ]
    except _BAD_FILE as error:
        raise ValueError(
            f"{path} is not a complete checkpoint of jaxcoll ({type(error).__name__}: {error})."
        ) from error
    # The names are equal, but perhaps in another order: of a dict built otherwise, say.
    by_name = dict(zip(about["leaves"], held, strict=True))
    found = iter([by_name[name] for name in wanted])
    nodes, structure = jax.tree.flatten(like, is_leaf=is_shards)
    held = [_restored(node, found) for node in nodes]
    return jax.tree.unflatten(structure, held), about["step"]


def _restored(node: Any, found: Iterator[Any]) -> Any:
    """The next leaf; or, for Shards, the next ones, cut as they are."""
    if not is_shards(node):
        return next(found)
    leaves = [next(found) for _ in node.layout.leaves]
    return cut_like(leaves, node) if node.parts else node


def stamp_of_checkpoint(path: Path) -> Stamp:
    """The stamp of the state in a file; step -1: there is none, or no complete checkpoint."""
    try:
        with zipfile.ZipFile(path) as archive:
            about = json.loads(archive.read(_ABOUT))
            return Stamp(int(about["step"]), int(about.get("term", 0)))
    except (FileNotFoundError, ValueError, *_BAD_FILE):
        return Stamp(-1, 0)


def on_host(name: str, leaf: Any) -> np.ndarray:
    """A leaf of a state as a host array; refused unless it is complete here, and of numbers."""
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
    masked = isinstance(leaf, np.ma.MaskedArray)
    if array.dtype.kind in "OUSMm" or array.dtype.names or masked:
        raise ValueError(
            f"state{name} is not an array of numbers: got {type(leaf).__name__} ({array.dtype})."
        )
    return array


def _named(tree: Any, whole: Callable[[Shards], Any]) -> dict[str, Any]:
    """Every leaf by its path, `Shards` as the tree that `whole` makes of them."""
    found: dict[str, Any] = {}
    for path, node in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_shards)[0]:
        inner = whole(node) if is_shards(node) else node
        for within, leaf in jax.tree_util.tree_flatten_with_path(inner)[0]:
            name = jax.tree_util.keystr((*path, *within))
            if name in found:
                raise ValueError(
                    f"two leaves of the tree are called {name}, and a checkpoint would hold one of "
                    "them: give the children of that class different keys where it is registered."
                )
            found[name] = leaf
    return found


def _whole(shards: Shards) -> Any:
    """The tree of shards that this process holds all of; others are refused."""
    for part in shards.parts:
        if isinstance(part, jax.Array) and not part.is_fully_addressable:
            raise ValueError(
                "`save_checkpoint`: the tree holds `Shards` of which other processes hold parts. "
                "Call `whole = jc.unshard(tree)` in all processes, which brings them together, and "
                "save `whole` in one; `restore_checkpoint` cuts it again."
            )
    return joined(shards)


def _plain(x: np.ndarray) -> np.ndarray:
    """An array that NumPy can save: bfloat16 and other added dtypes as bytes."""
    x = np.ascontiguousarray(x)
    return x.reshape(-1).view(np.uint8) if x.dtype.kind == "V" else x


def _check_same(path: Path, held: dict[str, Any], wanted: dict[str, Any]) -> None:
    if held.keys() != wanted.keys():
        lacks = [name for name in wanted if name not in held]
        has = [name for name in held if name not in wanted]
        raise ValueError(
            f"{path} holds another tree: it lacks {', '.join(lacks) or 'nothing'}, and has "
            f"{', '.join(has) or 'nothing'} beside."
        )
    for name, leaf in wanted.items():
        dtype, shape = held[name]
        asked = getattr(leaf, "dtype", None) or np.asarray(leaf).dtype
        if (dtype, shape) != (str(np.dtype(asked)), list(np.shape(leaf))):
            raise ValueError(
                f"{path}: the leaf {name} is {dtype}{shape} in the file, and "
                f"{np.dtype(asked)}{list(np.shape(leaf))} is expected."
            )
