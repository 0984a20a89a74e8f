"""What several of these tests look at."""

import re
from collections import Counter

import numpy as np
import pytest

from jaxcoll._distribute import all_reduce_ops
from jaxcoll._observe.parse.hlo import read_hlo

COLLECTIVE = re.compile(
    r"= \w+\[([\d,]*)\]\S* "
    r"(all-reduce|reduce-scatter|all-gather|collective-permute|all-to-all)\("
)


class Programs(list):
    """The programs that ops between programs ran, as they were handed to the compiler."""

    def collectives(self):
        """Name and elements of each collective of the last program, in order."""
        return [
            (name, int(np.prod([int(k) for k in shape.split(",") if k])))
            for shape, name in COLLECTIVE.findall(self[-1])
        ]

    def sizes(self):
        """The elements of each collective of the last program."""
        return [elements for _, elements in self.collectives()]

    def count(self):
        """How often each collective stands in the last program."""
        return Counter(name for name, _ in self.collectives())

    def groups(self):
        """The groups of devices of the last program's collectives."""
        return {tuple(map(tuple, each.groups)) for each in read_hlo(self[-1]).collectives}


@pytest.fixture
def programs(monkeypatch):
    found = Programs()

    def spy(*args):
        program = make(*args)

        def run(*values):
            found.append(program.lower(*values).as_text(dialect="hlo"))
            return program(*values)

        return run

    make = all_reduce_ops.replicating
    monkeypatch.setattr(all_reduce_ops, "replicating", spy)
    return found
