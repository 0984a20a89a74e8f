"""Refuses a step that changes an object among its arguments and does not return the change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from jaxcoll._jaxpr.retrace import unused_outputs
from jaxcoll._mesh.placement import is_array

_LOST = """\
`data_parallel`: the step changes {name} in place{others} and neither returns nor uses what it \
becomes, so the change would be lost: as with `jax.jit`, a step works on copies of the objects \
among its arguments. What to do: return the object from the step, and go on with what it returns; \
or pass its arrays, as of `graph, state = nnx.split(module)`, put it together in the step by \
`nnx.merge(graph, state)`, and return `nnx.state(module)`."""


def check_lost_updates(
    step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Refuse a step that would lose what it changes in an object, as in a module of flax's nnx."""
    # It is traced once more for this, so only if there is such an object.
    if not _has_mutable(jax.tree.structure((args, kwargs))):
        return
    names: list[str] = []

    def with_changes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, list[Any]]:
        before = _named(args, kwargs)
        result = step(*args, **kwargs)
        after = _named(args, kwargs)
        names[:] = [name for name in after if after[name] is not before.get(name, after[name])]
        return result, [after[name] for name in names]

    traced = jax.jit(with_changes).trace(args, kwargs)
    lost = [names[k] for k in unused_outputs(traced.jaxpr, len(names))]
    if lost:
        others = f" (and {len(lost) - 1} more)" if lost[1:] else ""
        raise ValueError(_LOST.format(name=lost[0], others=others))


def _has_mutable(structure: Any) -> bool:
    """Whether a tree has nodes that a function may change, other than dicts and lists."""
    node = structure.node_data()
    if node is None:  # a leaf
        return False
    return _is_mutable(node[0]) or any(map(_has_mutable, structure.children()))


def _is_mutable(kind: type) -> bool:
    parameters = getattr(kind, "__dataclass_params__", None)
    return not issubclass(kind, dict | list | tuple | type(None)) and not getattr(
        parameters, "frozen", False
    )


def _named(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arrays of those arguments that have mutable objects in them, by name."""
    given = [*((f"args[{i}]", x) for i, x in enumerate(args)), *kwargs.items()]
    return {
        name + jax.tree_util.keystr(path): leaf
        for name, tree in given
        if _has_mutable(jax.tree.structure(tree))
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
        if is_array(leaf)
    }
