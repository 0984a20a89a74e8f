"""What several of these tests look at."""

from collections import Counter

import pytest

from jaxcoll._hlo.hlo import read_hlo
from jaxcoll.distribute import _all_reduce_ops as all_reduce_ops


class Programs(list):
    """The programs that ops between programs ran, as they were handed to the compiler."""

    def kinds(self):
        """The kind of each collective of the last program, in order."""
        return [each.kind for each in read_hlo(self[-1]).collectives]

    def sizes(self):
        """The elements of each collective of the last program."""
        return [each.operands[0].size for each in read_hlo(self[-1]).collectives]

    def count(self):
        """How often each collective stands in the last program."""
        return Counter(self.kinds())

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

    make = all_reduce_ops.make_program
    monkeypatch.setattr(all_reduce_ops, "make_program", spy)
    return found
