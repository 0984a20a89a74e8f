"""The two loops: each layer's parameters gathered ahead of it, each gradient scattered after it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxcoll import _compat
from jaxcoll._jaxpr.retrace import Traced
from jaxcoll._spmd.layers.exchange import Arrays, Exchange
from jaxcoll._spmd.layers.layer_program import Residuals


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The order of gathers, computation and scatters, for arrays of certain types."""

    layers: int  # how many
    ahead: int  # layers whose parameters are gathered, or under way, while another is computed
    unroll: int  # turns of a loop that are one turn of the compiled loop
    program: Traced  # of one of them: from carry, parameters and captured values to the next carry
    # By the leaves of the stack that travel together; others every replica holds whole
    gathers: dict[tuple[int, ...], Exchange]
    varying: tuple[str, ...]  # axes that everything in the loops is typed as varying over

    def _fetched(
        self, stack: Arrays, index: Any, after: Mapping[int, jax.Array] = MappingProxyType({})
    ) -> dict[int, jax.Array]:
        """The leaves of one layer that have to be gathered."""
        return self._exchanged(self.gathers, lambda i: at(stack[i], index), after)

    def _exchanged(
        self,
        exchanges: Mapping[tuple[int, ...], Exchange],
        array: Callable[[int], jax.Array],
        after: Mapping[int, jax.Array],
    ) -> dict[int, jax.Array]:
        """Return each leaf's array after its exchange, once others are there."""
        exchanged: dict[int, jax.Array] = {}
        for leaves, exchange in exchanges.items():
            arrays = [*map(array, leaves)]
            # Outside of loops a compiler would merge two layers' collectives, to hide neither.
            for other in after.values():
                arrays = [_compat.ordered(x, after=other) for x in arrays]
            exchanged.update(zip(leaves, self._vary(exchange(arrays)), strict=True))
        return exchanged

    def _params(self, stack: Arrays, index: Any, gathered: dict[int, jax.Array]) -> Arrays:
        """All parameters of one layer."""
        return [
            gathered[i] if i in gathered else self._vary([at(x, index)])[0]
            for i, x in enumerate(stack)
        ]

    def example(self, stack: Arrays) -> Arrays:
        """Arrays like one layer's parameters."""
        shapes = jax.eval_shape(
            lambda stack: self._params(stack, 0, self._fetched(stack, 0)), stack
        )
        return self._vary([jnp.zeros(x.shape, x.dtype) for x in shapes])

    def _vary(self, arrays: Sequence[Any]) -> list[Any]:
        return [_compat.as_varying(x, self.varying) for x in arrays]

    def forward(
        self, carry: Arrays, stack: Arrays, captured: Arrays, residuals: Residuals | None = None
    ) -> tuple[Arrays, Arrays, Arrays, list[dict[int, jax.Array]]]:
        """The last carry, every layer's results, what is saved, and what is gathered still."""
        ahead, program = min(self.ahead, self.layers), (residuals or self).program
        results = range(len(carry), len(self.program.program.out_avals))
        # The positions, among what a layer gives, of what is there for each of them in the end.
        stays = [*results, *(residuals.saved if residuals else ())]

        def turn(state: Any, index: Any, fetch: bool) -> Any:
            carry, stacks, queue = state
            if fetch:
                queue = [*queue, self._fetched(stack, index + ahead)]
            params = self._params(stack, index, queue[0])
            outs = program.outputs(carry, params, captured)
            stacks = put(stacks, self._vary([outs[k] for k in stays]), index)
            return outs[: len(carry)], stacks, queue[1:]

        avals = [program.program.out_avals[k] for k in stays]
        room = self._vary([jnp.zeros((self.layers, *a.shape), a.dtype) for a in avals])
        queue: list[dict[int, jax.Array]] = []
        for index in range(ahead):
            queue.append(self._fetched(stack, index, queue[-1] if queue else {}))
        state = carry, room, queue
        until = self.layers - ahead
        state = self._loop(lambda s, i: turn(s, i, True), state, 0, until, 1)
        last = state[2]
        for index in range(until, self.layers):
            state = turn(state, index, False)
        carry, stacks, _ = state
        return carry, stacks[: len(results)], stacks[len(results) :], last

    def backward(
        self,
        residuals: Residuals,
        saved: Arrays,
        last: list[dict[int, jax.Array]],  # the last layers' parameters, gathered
        stack: Arrays,
        captured: Arrays,
        cotangents: Sequence[Arrays],  # of the floating arrays of the last carry, and of results
        # Positions in the stack, and in what is captured, whose cotangents are asked for
        moved: Sequence[Sequence[int]],
        scatters: Mapping[tuple[int, ...], Exchange],  # by leaves that travel together
    ) -> tuple[Arrays, dict[int, jax.Array], Arrays]:
        """Cotangents of the first carry's floating arrays, and of those asked for.

        Those of rows are scattered, in the turn after their layer's; others are this replica's.
        """
        of_carry, of_results = cotangents
        ahead, top = len(last), self.layers - 1
        cut = {i for leaves in scatters for i in leaves}

        def turn(state: Any, index: Any, fetch: bool, after: Any = MappingProxyType({})) -> Any:
            ct, gradients, sums, waiting, queue = state
            # The gather of a layer below and the scatter of the layer above stand before this
            # layer's own arithmetic and depend on none of it, so that a compiler can hide both.
            if fetch:
                queue = [*queue, self._fetched(stack, index - ahead)]
            done = self._exchanged(scatters, waiting.__getitem__, after) if waiting else {}
            gradients = self._with(gradients, done, index + 1)
            params = self._params(stack, index, queue[0])
            cts = [*ct, *(at(x, index) for x in of_results)]
            kept = [at(x, index) for x in saved]
            pulled = iter(residuals.backward(kept, params, captured, cts))
            ct = self._vary([next(pulled) for _ in ct])
            of_layer = self._vary([next(pulled) for _ in moved[0]])
            sums = [total + x for total, x in zip(sums, pulled, strict=True)]
            both = list(zip(moved[0], of_layer, strict=True))
            whole = {i: x for i, x in both if i not in cut}
            waiting = {i: x for i, x in both if i in cut}
            return (ct, self._with(gradients, whole, index), sums, waiting, queue[1:]), done

        gradients = {i: self._vary([jnp.zeros_like(stack[i])])[0] for i in moved[0]}
        sums = [jnp.zeros_like(captured[i]) for i in moved[1]]
        state = of_carry, gradients, sums, {}, last[::-1]
        state, done = turn(state, top, ahead <= top)
        # Below `ahead` every layer is gathered, or under way.
        state = self._loop(lambda s, i: turn(s, i, True)[0], state, top - 1, ahead - 1, -1)
        for index in range(min(ahead, top) - 1, -1, -1):
            state, done = turn(state, index, False, done)
        ct, gradients, sums, waiting, _ = state
        done = self._exchanged(scatters, waiting.__getitem__, done)
        return ct, self._with(gradients, done, 0), sums

    def _with(
        self, stacks: dict[int, jax.Array], parts: dict[int, jax.Array], index: Any
    ) -> dict[int, jax.Array]:
        """Arrays that have the layers first, with one layer's parts in their places."""
        placed = put([stacks[i] for i in parts], list(parts.values()), index)
        return {**stacks, **dict(zip(parts, placed, strict=True))}

    def _loop(
        self, turn: Callable[[Any, Any], Any], state: Any, start: int, stop: int, step: int
    ) -> Any:
        indices = jnp.arange(start, stop, step, dtype=jnp.int32)
        if not len(indices):
            return state
        return lax.scan(lambda s, i: (turn(s, i), None), state, indices, unroll=self.unroll)[0]


def at(x: jax.Array, index: Any) -> jax.Array:
    """One layer's part of an array that has the layers first."""
    if isinstance(index, int):
        return lax.index_in_dim(x, index, keepdims=False)
    return lax.dynamic_index_in_dim(x, index, keepdims=False, allow_negative_indices=False)


def put(arrays: Sequence[Any], parts: Sequence[Any], index: Any) -> Arrays:
    """Arrays that have the layers first, with one layer's parts in their places."""
    return [
        lax.dynamic_update_index_in_dim(x, part, index, 0, allow_negative_indices=False)
        for x, part in zip(arrays, parts, strict=True)
    ]
