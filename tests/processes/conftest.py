"""Functions of a test module in several processes."""

import functools

import cloudpickle
import pytest

import jaxcoll as jc


@pytest.fixture(scope="module")
def launch(request):
    """`jc.launch` of what a module defines; the processes are forks, which have imported jaxcoll."""
    import forks

    from jaxcoll._job.launch import supervisor

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(supervisor, "killed_on_exit", forks.running)
        cloudpickle.register_pickle_by_value(request.module)
        yield functools.partial(jc.launch, timeout_seconds=120.0)
        cloudpickle.unregister_pickle_by_value(request.module)
