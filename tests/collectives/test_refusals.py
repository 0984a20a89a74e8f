"""Calls that are refused while they are traced, and the words that say why, and the way out."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import P, grid, mapped, mesh_of, refused, rows

import jaxcoll as jc
from jaxcoll import IndexedSlices

INT8 = jc.CommunicationOptions(compression="int8")
X = rows(2, 3)


def total(value, axis="data", **how):
    return jc.all_reduce("sum", value, axis, **how)


def cut(value, **asked):
    options = jc.CommunicationOptions(**asked)
    return jc.reduce_scatter("sum", {"s": value}, "data", options=options)


def changed(change):
    """Slices whose parts a transformation has replaced."""
    return lambda x: total({"e": jax.tree.map(change, IndexedSlices(x, jnp.arange(3))), "x": x})


CALLS = [
    # Axes
    (lambda x: total(x, "dta"), NameError,
     r"`all_reduce` over axis 'dta': no such axis here. Did you mean 'data'\? If"),
    (lambda x: jc.pmean(x, "batch"), NameError, "`jc.pmean` over axis 'batch': .* mean 'data'?"),
    (jc.value_and_grad(lambda v: v, "dta"), NameError, r"`jc.value_and_grad` over axis 'dta'"),
    (lambda x: jc.all_gather(x, "nope"), NameError, "`all_gather` over axis 'nope': no such axis"),
    (lambda x: jc.sync_in_backward(x, "model"), NameError, "`sync_in_backward` over axis 'model'"),
    (lambda x: jc.global_norm(x, "model"), NameError, "`jc.global_norm` over axis 'model'"),
    (lambda x: jc.all_finite(x, "model"), NameError, "`jc.all_finite` over axis 'model'"),
    *((lambda x, axis=axis: total(x, axis), ValueError, words) for axis, words in (
        (3, "a string or a non-empty tuple"), ((), "non-empty tuple"),
        (None, "needs an `axis_name` here"), (("data", "data"), "an axis twice"))),
    (lambda x: jax.jit(lambda axis: total(x, axis))(3), ValueError, "make the argument static"),
    (lambda x: total(x, options=jc.CommunicationOptions(algorithm="nccl/xring")), ValueError,
     r"'native/ring' is hierarchical.*a tuple of 2 axes .* \(outer, inner\), and got 1"),
    # Arguments
    (lambda x: total(x, invariant="skip"), ValueError,
     "`invariant` must be one of 'error', 'summed', 'replic"),
    *((lambda x, axis=axis: jc.all_gather({"a": jnp.outer(x, x), "b": x}, "data", axis=axis),
       ValueError, words) for axis, words in (
        (1, r"`all_gather`: leaf \['b'\] has shape \(3,\) and so no axis 1; expected one from -1 to 0"),
        (-3, r"leaf \['a'\] has shape \(3, 3\) and so no axis -3; expected one from -2 to 1"),
        *((odd, f"expected `axis` to be an integer; got {odd}") for odd in (0.0, True, None)))),
    (lambda x: jc.all_gather(x[0], "data"), ValueError, r"the value is a scalar.*`x\[None\]`"),
    (lambda x: jc.all_gather(x, "data", options=3), ValueError,
     "`options` must be a CommunicationOptions, as in"),
    *((lambda x, source=source: jc.broadcast(x, "data", source=source), ValueError,
       f"expects `source` to be an integer from 0 to 1, .* along 'data'; got {source}")
      for source in (2, -1, 1.0, True, None)),
    (lambda x: cut(x, shards=2), ValueError, r"one shard for each replica, and `shards=2`"),
    (lambda x: jc.all_gather(cut(x), "data", axis=1), ValueError,
     r"`all_gather` of Shards returns the whole tree, .* `axis` \(1\)"),
    # Leaves without a sum, a shard, a norm
    *((lambda x, leaf=leaf: total({"a": [x, leaf]}), ValueError,
       rf"cannot reduce leaf \['a'\]\[1\]: .*{words}") for leaf, words in (
        (np.ones(3, bool), "booleans have no sum of their own type"),
        (True, "booleans have no sum"),
        (np.zeros(3, jax.dtypes.float0), "float0 is the gradient of an integer input"),
        (np.array(["a"]), "an array of <U1 holds no numbers"),
        (np.ones(3, "int2"), "int2 cannot hold the sum of two"),
        (np.ones(3, "uint2"), "uint2 cannot hold the sum of two"),
        (jax.random.key(0), "a typed PRNG key has no"),
        (jax.ShapeDtypeStruct((2,), "f"), "got ShapeDtypeStruct"),
        ("text", "expected an array or a number, got str"),
        (object(), "expected an array or a number, got object"))),
    (lambda x: jc.all_gather({"k": "x"}, "data"), ValueError,
     r"cannot gather leaf \['k'\]: expected an array, got str"),
    (lambda x: jc.all_gather({"k": np.array([None])}, "data"), ValueError,
     "expected an array, got an array of object"),
    (lambda x: jc.all_gather({"k": IndexedSlices(x[:, None], jnp.arange(3), (3, 1))}, "data"),
     NotImplementedError, r"leaf \['k'\] is an IndexedSlices. To gather the rows"),
    (lambda x: cut(IndexedSlices(x[:, None], jnp.arange(3), (3, 1))), ValueError,
     r"`reduce_scatter` cannot cut leaf \['s'\] in shards: .* IndexedSlices. Call its `to_dense"),
    (lambda x: cut("x"), ValueError, r"leaf \['s'\] in shards: expected an array or a number, got str"),
    (lambda x: cut(jax.random.key(0)), ValueError, r"\['s'\] in shards: key<fry> holds no numbers"),
    (lambda x: cut(x > 0), ValueError, r"`reduce_scatter` cannot reduce leaf \['s'\]: booleans"),
    (lambda x: total({"e": IndexedSlices(x > 0, jnp.arange(3))}), ValueError,
     r"cannot reduce leaf \['e'\].values: booleans have no sum"),
    (changed(lambda a: a[None]), ValueError,
     r"`all_reduce`: leaf \['e'\] expects `values` of shape .*got values float32\[1, 3\]"),
    (changed(lambda a: None), ValueError, r"leaf \['e'\] expects `values` to be an array; got None"),
    *((lambda x, f=f, leaf=leaf: f({"a": leaf}), ValueError, f"`jc.{f.__name__}`.*{words}")
      for f in (jc.global_norm, jc.all_finite) for leaf, words in (
        ("word", r"leaf \['a'\]: expected numbers, got str"),
        (np.ones(2, bool), "expected numbers, got bool"),
        (IndexedSlices(np.ones((1, 2)), [0], (3, 2)), r"leaf \['a'\] is an IndexedSlices"))),
    # Metrics
    *((lambda x, metric=metric: jc.reduce_metrics(metric, "data"), ValueError, words)
      for metric, words in (
        ({"a": 1.0}, r"leaf \['a'\] is float, which does not say how it is added up"),
        ([jnp.ones(2)], r"leaf \[0\] is an array of float32"),
        (jc.Total("x"), "metric itself is made of str; expected numbers"),
        ({"k": jc.Total(jax.random.key(0))}, r"metric \['k'\] is made of key<fry>"),
        (jc.WeightedMean(np.ones(3), 1), r"a total of shape \(3,\) and a weight of shape \(\)"))),
    # Wire formats
    *((functools.partial(getattr(jc, name), axis_name="data", options=INT8), ValueError,
       f"`{name}` sends every value exactly") for name in ("all_gather", "broadcast", "global_norm")),
    (lambda x: cut(x, compression="int8"), ValueError, "`reduce_scatter` sends values exactly"),
    (lambda x: total(x.astype(int), options=INT8), ValueError,
     "reduces only int32, which travel exactly"),
    # Residuals
    *((lambda x, tree=tree, of=of: total(tree(x), residual=of(x), options=INT8), ValueError, words)
      for words, tree, of in (
        (r"leaf \['w'\] \(float32\[2\]\) is gone", lambda x: x,
         lambda x: jc.compression.residual({"w": x[1:]}, "data")),
        (r"float32\[3\], and was float32\[2\]", lambda x: {"w": x},
         lambda x: jc.compression.residual({"w": x[1:]}, "data")),
        ("got ndarray", lambda x: x, lambda x: np.zeros(3)))),
    # Gradients
    *((lambda x, tree=tree: jc.sync_in_backward(tree, "data"), ValueError, words)
      for tree, words in (
        ({"ids": np.ones(3, "i")}, r"leaf \['ids'\]: an array of int32 has no gradient.*None in place"),
        ([np.ones(3, "f"), True], r"leaf \[1\]: an array of bool"),
        (jax.random.key(0), r"the value: an array of key<fry>"),
        ({"name": "w"}, r"leaf \['name'\]: expected a floating array, got str"),
        (np.zeros(3, jax.dtypes.float0), r"an array of float0"))),
    *((lambda x, g=g: g(lambda w, x: jnp.mean(jc.sync_in_backward(w, "data", reduce_op="sum") * x),
                        "data")(2.0, x), ValueError,
       rf"over 'data' with reduce_op SUM, inside.*{name}")
      for g, name in ((jc.grad, "jc.grad"), (jc.value_and_grad, "value_and_grad"))),
    *((lambda x, made=made, loss=loss, how=how: made(loss, "data", *[1] * (made is jc.accumulate), **how)(x[0], x),
       error, rf"`jc.{made.__name__}`.*{words}")
      for made in (jc.value_and_grad, jc.grad, jc.accumulate) for error, loss, how, words in (
        (TypeError, lambda p, x: p * x, {}, r"scalar or a `jc.WeightedLoss`; got float32\[3\]"),
        (TypeError, lambda p, x: {"loss": p}, {}, r"got dict\. Return its mean"),
        (TypeError, lambda p, x: None, {}, "got NoneType"),
        (TypeError, lambda p, x: (p * x, 1.0), {}, r"a tuple of 2.*has_aux=True.*jc.WeightedLoss\(total, weig"),
        (TypeError, lambda p, x: jnp.mean(p * x), {"has_aux": True}, r"to return \(loss, aux\); got float32\[\]"),
        (ValueError, lambda p, x: jc.WeightedLoss(p, 1.0), {"reduce_op": "sum"}, "got a WeightedLoss with reduce_op SUM"),
        (ValueError, lambda p, x: jc.WeightedLoss(p, x), {}, "the weight of a WeightedLoss to be a scalar.*got shape"),
        (ValueError, lambda p, x: jc.WeightedLoss(x, p), {}, "the total of a WeightedLoss to be a scalar.*got shape"))),
    *((lambda x, args=args, how=how: jc.accumulate(lambda w, x: jnp.mean(w * x), "data", 4, **how)(*args),
       ValueError, words) for how, args, words in (
        ({}, (1.0, np.ones((6, 2), "f")), r"x has 6 rows.*\(6 = 4 × 1 \+ 2\)"),
        ({}, (1.0, {"x": np.ones(8, "f"), "t": 2.0}), r"x\['t'\] is a scalar"),
        ({"batch_argnums": 2}, (1.0, np.ones(8, "f")), "argument 2 is named in `batch_argnums`"),
        ({"argnums": (0, 1)}, (1.0, np.ones(8, "f")), "argument 'x' is in `argnums`, and is"))),
    *((lambda x, call=call, how=how: call(jnp.sum, "data", **how), ValueError, words)
      for call, how, words in (
        *((jc.accumulate, {"num_microbatches": n},
           "`num_microbatches` to be an integer above 0; got") for n in (0, -1, True, 2.0)),
        (jc.accumulate, {"num_microbatches": 2, "batch_argnums": ()}, r"`batch_argnums` is \(\)"),
        (jc.accumulate, {"num_microbatches": 2, "batch_argnums": 1.5},
         "`batch_argnums` must be a position or a name of an argument, .*; got 1.5"),
        *((jc.grad, {"argnums": n}, "`jc.grad` expects `argnums` to be a position or several")
          for n in ((), "p", 1.0, None)))),
    (lambda x: jc.grad("p", "data"), ValueError, "`jc.grad` expects a function, the loss, and return"),
]  # fmt: skip


@pytest.mark.tensorflow("G16")
@pytest.mark.parametrize(("call", "error", "words"), CALLS)
def test_wrong_calls_say_why(call, error, words):
    refused(words, call, X, error=error)


def test_axes_need_a_program():
    with pytest.raises(NameError, match="no such axis here. Call it inside `jax.shard_map`"):
        total(jnp.ones(3))


def test_foreign_worlds_are_refused():
    for n, words in (
        (3, r"'data' \(size 2\) got a residual of 3 replicas over 'data'"),
        (2, r"of shape \(1, 128\) on each .* got \(2, 128\)"),
    ):
        owed = jc.compression.residual(X[0], mesh=mesh_of(n))
        refused(words, lambda x, owed=owed: total(x, residual=owed, options=INT8), X)
    both = ("node", "data")
    words = r"over 'data' \(size 4\) got Shards of 8 replicas over 'node', 'data'"
    with pytest.raises(ValueError, match=words):
        mapped(
            lambda v: jc.all_gather(jc.reduce_scatter("sum", v, both), "data"),
            P(both),
            mesh=grid(2, 4),
        )(np.ones(8, "f"))
    mesh = jax.make_mesh((2, 4), ("data", "model"))
    x = jax.device_put(np.ones((2, 8), "f"), jax.NamedSharding(mesh, P("data", "model")))
    program = mapped(lambda v: cut(v).parts[0], outs=P("data"), mesh=mesh, axis_names={"data"})
    with pytest.raises(ValueError, match=r"leaf \['s'\] in shards: it is sharded over another axi"):
        program(x)


SLICES = [
    (("ab", [0]), r"`IndexedSlices` expects `values`.*got values str64\[\]"),
    (([[1], [2, 3]], [0, 1]), r"expects `values` to be an array; got \[\[1\], \[2, 3\]\] \(list\)"),
    (([1.0], [0.0]), r"expects `indices` to be integers; got float32\[1\]"),
    (([1.0], [True]), r"expects `indices` to be integers; got bool\[1\]"),
    ((1.0, 0), r"expects `values` of shape \(k, \*row\) and `indices` of shape \(k,\); got "
               r"values float32\[\] and indices int32\[\]"),
    (([[1.0, 2.0]], [0, 1]), r"got values float32\[1, 2\] and indices int32\[2\]"),
    (([[1.0, 2.0]], [[0]]), r"got values float32\[1, 2\] and indices int32\[1, 1\]"),
    (([[1.0, 2.0]], [0], (5, 3)), r"the shape of a row of its values, \(2,\); got \(5, 3\)"),
    (([1.0], [0], ()), r"the shape of a row of its values, \(\); got \(\)"),
    (([1.0], [0], 5), "expects `dense_shape` to be a tuple of integers, .* or None; got 5"),
    (([1.0], [0], (-1,)), r"`dense_shape` .*; got \(-1,\)"),
    (([1.0], [0], (5.0,)), r"`dense_shape` .*; got \(5.0,\)"),
]  # fmt: skip


def test_wrong_slices_say_why():
    for arguments, words in SLICES:
        with pytest.raises(ValueError, match=words):
            IndexedSlices(*arguments)
    sparse = IndexedSlices([1.0, 2.0], [0, 1])
    narrow = lambda size, kind: IndexedSlices(np.ones((1, 1), "f"), np.array([3], kind), (size, 1))
    for call, words in (
        (sparse.to_dense, "`to_dense` needs to know how many rows there are"),
        (lambda: sparse.padded(1), "`padded` got a bound of 1, but there are 2 rows already"),
        (lambda: sparse.padded(2.5), "`padded` expects an integer `bound`; got 2.5"),
        (lambda: jax.jit(lambda x: x.without_padding())(sparse), "`without_padding` needs the indic"),
        (lambda: narrow(256, "u1").padded(2), "`padded` needs an index outside of the 256 rows"),
        (lambda: narrow(200, "i1").padded(2), "needs an index .* make `indices` wider"),
        (lambda: jc.plan([jax.tree.map(lambda a: a[None], IndexedSlices([1.0], [0]))], axis_size=2),
         r"`plan`: leaf \[0\] expects `values`"),
        (lambda: jc.plan([IndexedSlices([True], [0])], axis_size=2), r"\[0\].values: booleans"),
        (lambda: jc.plan(X.astype(int), axis_size=2, options=INT8), "reduces only int32, which"),
        (lambda: jc.plan(X, axis_size=2, collective="psum"), "must be 'all_reduce', 'reduce_scatter' or"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            call()
    assert narrow(255, "u1").padded(jnp.int32(2)).indices.tolist() == [3, 255]
