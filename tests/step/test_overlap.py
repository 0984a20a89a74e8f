"""Packs that stay apart in the compiled program, and in no other."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import close, mapped

import jaxcoll as jc
from jaxcoll._compat import compiler
from jaxcoll._compat.settings import drop_unknown_options
from jaxcoll._report.aot import lay_out_step
from jaxcoll._step.mesh.clusters import topology_named

PARAMS = [np.full((16, 16), 0.1, np.float32) for _ in range(6)]
X = np.ones((8, 16), np.float32)


def step(params, x):
    loss = lambda params, x: jnp.mean(functools.reduce(lambda x, w: jnp.tanh(x @ w), params, x))
    return jc.value_and_grad(loss, "data")(params, x)


def test_requested_packs_are_compiled_packs():
    """And only those that are."""
    options = jc.CommunicationOptions(overlap=True, bytes_per_pack=1024)
    report = jc.inspect(jc.data_parallel(step, options=options), PARAMS, X)
    (plan,) = report.plans
    assert len(plan.packs) > 3
    assert report.count == len(report.requested) == len(plan.packs)
    names = [(f"{plan.name}/pack{k}",) for k in range(report.count)]
    assert sorted(row.packs for row in report.rows) == names
    assert all(len(c.operands) == 1 for c in report.collectives)
    report = jc.inspect(jc.data_parallel(step, options=options.replace(overlap=False)), PARAMS, X)
    assert report.count == 1
    assert report.plans[0].compiler_options() == {}


def test_own_jit_takes_plan_options():
    options = jc.CommunicationOptions(overlap=True, bytes_per_pack=1024)
    plan = jc.plan(PARAMS, axis_size=8, options=options)
    assert plan.compiler_options("gpu") == {}
    assert plan.compiler_options("tpu") == {"xla_jf_crs_combiner_threshold_in_bytes": 65536}
    reduce = mapped(lambda tree: jc.all_reduce("mean", tree, "data", options=options), mesh=8)
    rows = [np.ones((8 * 16, 16), np.float32)] * 6
    report = jc.inspect(jax.jit(reduce, compiler_options=plan.compiler_options()), rows)
    assert report.count == len(plan.packs) == 6


def test_steps_get_their_plans_options():
    cluster, traces, plans = topology_named("h100:8"), [], []

    def step(params, x):
        traces.append(1)
        synced = lambda params, x: functools.reduce(
            lambda x, w: jnp.tanh(x @ w), jc.sync_in_backward(params, "data"), x
        ).mean()
        return jc.grad(synced, "data")(params, x)

    large = [jax.ShapeDtypeStruct((1024, 1024), np.float32)] * 2
    rows = jax.ShapeDtypeStruct((8, 1024), np.float32)
    traced = lay_out_step(jc.data_parallel(step), cluster).trace_recorded(plans.append, large, rows)
    assert compiler.compiler_options(traced) == plans[0].compiler_options() != {}
    assert (len(traces), len(plans)) == (1, 2)

    options = jc.CommunicationOptions(overlap=True, timeout_seconds=60)
    program = jc.data_parallel(step, options=options)
    for _ in range(2):
        found = program(PARAMS, X)
    assert len(traces) == 2
    close(found, jc.data_parallel(step)(PARAMS, X))
    # Parts of a sharded gradient, too.
    scatter = lambda p, x: jc.reduce_scatter("sum", p * x.sum(), "data")
    halves = jc.data_parallel(lambda p, x: jc.all_gather(scatter(p, x), "data"), options=options)
    assert set(compiler.compiler_options(lay_out_step(halves, cluster).trace(large[0], rows))) == {
        "xla_gpu_reduce_scatter_combine_threshold_bytes",
        "xla_gpu_all_gather_combine_threshold_bytes",
    }


def test_unknown_options_are_dropped():
    with pytest.warns(RuntimeWarning, match="does not know xla_no_such_option"):
        assert drop_unknown_options({"xla_no_such_option": 1}, jax.devices()[0]) == {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert drop_unknown_options({"xla_disable_hlo_passes": "x"}, jax.devices()[0])
