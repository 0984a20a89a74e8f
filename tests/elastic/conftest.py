"""What several of these tests look at."""

import pytest

from jaxcoll._train.elastic.membership import Membership


@pytest.fixture
def memberships(monkeypatch):
    """Those of `Elastic` runs, in the order in which they began."""
    found, enter = [], Membership.enter
    monkeypatch.setattr(Membership, "enter", lambda one, *at: found.append(one) or enter(one, *at))
    return found
