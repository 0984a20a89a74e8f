"""A plan through JSON and back, and as HTML."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxcoll as jc

DTYPES = ["float32", "bfloat16", "float16", "int8", "float8_e4m3fn", "complex64"]
WORLDS = [
    {"axis_size": 8}, {"axis_size": (2, 4)}, {"axis_size": 1}, {"topology": "h100:2x8"},
    {"topology": "v5e:2x4"}, {"topology": "b200:4x8", "axis_name": ("host", "gpu")},
]  # fmt: skip
OPTIONS = [
    {}, {"bytes_per_pack": 64}, {"algorithm": "ring"}, {"reproducible": True}, {"overlap": True},
    {"algorithm": "shuffle", "shards": 1, "bytes_per_pack": 1 << 20},
]  # fmt: skip
LEAVES = st.lists(
    st.tuples(st.lists(st.integers(0, 5), max_size=3), st.sampled_from(DTYPES)), max_size=6
)


@settings(max_examples=60, deadline=None)
@given(LEAVES, st.sampled_from(WORLDS), st.sampled_from(OPTIONS), st.sampled_from(["sum", "mean"]))
def test_law_a_plan_survives_json(leaves, world, options, reduce_op):
    tree = [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape, dtype in leaves]
    options = jc.CommunicationOptions(**options)
    plan = jc.plan({"<a>": tree}, **world, options=options, reduce_op=reduce_op)
    again = jc.Plan.from_json(plan.to_json())
    assert again == plan
    assert hash(again) == hash(plan)
    assert (str(again), again.to_json(), again.name) == (str(plan), plan.to_json(), plan.name)
    assert again.predicted == plan.predicted


def test_a_sparse_leaf_and_a_plan_that_was_carried_out():
    slices = jc.IndexedSlices(np.zeros((2, 3), "f"), np.arange(2), (9, 3))
    plan = jc.plan({"e": slices}, axis_size=4)
    assert jc.Plan.from_json(plan.to_json()) == plan
    step = jc.data_parallel(lambda w, x: jc.all_reduce("mean", w * x.sum(), "data"))
    (made,) = step.plans(np.ones(3, "f"), np.ones(8, "f"))
    again = jc.Plan.from_json(made.to_json())
    assert str(again) == str(made)
    assert again.to_json() == made.to_json()


def test_as_html_nothing_of_a_tree_is_markup():
    plan = jc.plan({"<b>&": [np.zeros(k + 1, "f") for k in range(50)]}, axis_size=8)
    shown = plan._repr_html_()
    assert "<b>&amp;" not in shown
    assert "[&#x27;&lt;b&gt;&amp;&#x27;][0]" in shown
    assert "… and 10 more" in shown
    assert plan.terms.source in shown
    assert "<table>" not in jc.plan([], axis_size=8)._repr_html_()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: [], "TypeError"),
        (lambda data: {**data, "version": 9}, "of version 9"),
        (lambda data: {**data, "format": "other"}, "'other' of version 1"),
        (lambda data: {**data, "fields": {}}, "KeyError: 'leaves'"),
        (lambda data: {**data, "fields": {**data["fields"], "terms": {}}}, "no file of cost terms"),
    ],
    ids=["a list", "newer", "other", "empty", "no terms"],
)
def test_what_is_no_plan_is_refused(change, words):
    data = json.loads(jc.plan(np.ones(3), axis_size=2).to_json())
    with pytest.raises(ValueError, match=f"expected what `Plan.to_json` writes.*{words}"):
        jc.Plan.from_json(json.dumps(change(data)))
    with pytest.raises(ValueError, match="expected what `Plan.to_json` writes.*got 'hello'"):
        jc.Plan.from_json("hello")
