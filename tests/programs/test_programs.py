"""Six programs of other libraries' users, over replicas: how many lines change, and equal losses.

Each is written as the guide of its library writes it. One is written once more with jaxcoll; of the
others a few words change. docs/libraries.md has more.
"""

import difflib
import inspect

import numpy as np
import pytest
from programs import with_equinox, with_flax, with_haiku_and_optax

import jaxcoll as jc

pytestmark = pytest.mark.usefixtures("types_may_mix")

NAMED = '@jc.data_parallel(batch_argnums="batch")'
TWO = {"@jax.jit": "@jc.data_parallel", "jax.value_and_grad(loss)": "jc.value_and_grad(loss)"}
PROGRAMS = {  # module and name: lines of the plain program that change or go, lines that come, words
    (with_flax, "train_state"): (2, 2, TWO),
    (with_flax, "batch_norm"): (3, 3, {
        "@jax.jit": NAMED,
        "NORMED.apply": "SYNCED.apply",
        "jax.value_and_grad": "jc.value_and_grad",
    }),
    (with_flax, "nnx_in_place"): (4, 4, {
        "@nnx.jit": NAMED,
        "nnx.value_and_grad(loss)(module)": "jc.pmean(nnx.value_and_grad(loss)(module))",
        "return value": "return value, module, optimizer",
        "value = step": "value, module, optimizer = step",
    }),
    (with_equinox, "recurrent"): (2, 2, {
        "@eqx.filter_jit": NAMED,
        "eqx.filter_value_and_grad(cross_entropy)": "jc.value_and_grad(cross_entropy)",
    }),
    (with_haiku_and_optax, "accumulated"): (9, 6, None),
    (with_haiku_and_optax, "lookahead"): (2, 2, TWO),
}  # fmt: skip


def texts_of(module, name):
    """The program of one device, and that of several."""
    words = PROGRAMS[module, name][2]
    if words is None:
        kinds = ("plain", "parallel")
        return [inspect.getsource(getattr(module, f"{name}_{kind}")) for kind in kinds]
    plain = parallel = inspect.getsource(getattr(module, name))
    for before, after in words.items():
        assert plain.count(before) == 1
        parallel = parallel.replace(before, after)
    return plain, parallel


def losses(module, text):
    names = {**vars(module), "jc": jc}
    exec(text, names)
    return np.array(names[text[4 : text.index("(")]](), np.float64)


EVERY = pytest.mark.parametrize(("module", "name"), PROGRAMS, ids=[name for _, name in PROGRAMS])


@EVERY
def test_replicas_repeat_one_devices_losses(module, name):
    want, found = (losses(module, text) for text in texts_of(module, name))
    assert len(set(want)) > 1
    np.testing.assert_allclose(found, want, rtol=2e-5)


@EVERY
def test_so_many_lines_of_a_program_change(module, name):
    before, after = (text.splitlines()[1:] for text in texts_of(module, name))
    changes = [line[0] for line in difflib.ndiff(before, after) if line[0] in "+-"]
    assert (changes.count("-"), changes.count("+")) == PROGRAMS[module, name][:2]
