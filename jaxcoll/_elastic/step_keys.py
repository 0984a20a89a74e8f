"""What workers agree upon before a step, forgotten when all are past it."""

from __future__ import annotations

from jaxcoll._cluster.key_value import Keys

BLOCK = 1000
"""Steps of which all keys are deleted together."""


class StepKeys:
    """Keys for the steps of one generation, which do not become more the longer it lasts.

    Args:
      store: where they are.
      folder: below which.
      step: the first of the generation.
    """

    def __init__(self, store: Keys, folder: str, step: int) -> None:
        self._store, self._folder = store, folder
        self._block = step // BLOCK

    def agree(self, step: int, value: str) -> str:
        """The first value that anybody wrote for this step."""
        return self._store.agree(f"{self._folder}/{step // BLOCK}/{step}", value)

    def forget(self, begun: int) -> None:
        """Delete what stands for whole blocks of steps before one that all workers have begun."""
        for block in range(self._block, begun // BLOCK):
            self._store.delete(f"{self._folder}/{block}")
            self._block = block + 1
