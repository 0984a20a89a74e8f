"""Programs of other libraries' users, with a few words changed: equal losses over replicas.

Each is written as the guide of its library writes it. docs/libraries.md has more.
"""

import inspect

import numpy as np
import pytest
from programs import with_equinox, with_flax

import jaxcoll as jc

pytestmark = pytest.mark.usefixtures("types_may_mix")

NAMED = '@jc.data_parallel(batch_argnums="batch")'
PROGRAMS = {  # module and name: the words that change
    (with_flax, "train_state"): {
        "@jax.jit": "@jc.data_parallel",
        "jax.value_and_grad(loss)": "jc.value_and_grad(loss)",
    },
    (with_flax, "batch_norm"): {
        "@jax.jit": NAMED,
        "NORMED.apply": "SYNCED.apply",
        "jax.value_and_grad": "jc.value_and_grad",
    },
    (with_flax, "nnx_in_place"): {
        "@nnx.jit": NAMED,
        "nnx.value_and_grad(loss)(module)": "jc.pmean(nnx.value_and_grad(loss)(module))",
        "return value": "return value, module, optimizer",
        "value = step": "value, module, optimizer = step",
    },
    (with_equinox, "recurrent"): {
        "@eqx.filter_jit": NAMED,
        "eqx.filter_value_and_grad(cross_entropy)": "jc.value_and_grad(cross_entropy)",
    },
}


def losses(module, text):
    names = {**vars(module), "jc": jc}
    exec(text, names)
    return np.array(names[text[4 : text.index("(")]](), np.float64)


@pytest.mark.parametrize(("module", "name"), PROGRAMS, ids=[name for _, name in PROGRAMS])
def test_replicas_repeat_one_devices_losses(module, name):
    plain = parallel = inspect.getsource(getattr(module, name))
    for before, after in PROGRAMS[module, name].items():
        assert plain.count(before) == 1
        parallel = parallel.replace(before, after)
    want = losses(module, plain)
    assert len(set(want)) > 1
    np.testing.assert_allclose(losses(module, parallel), want, rtol=2e-5)
