"""Steps in the styles of public training code: each does what `jax.pmap` does, on every replica.

proof/random_programs.py has every exchange and control flow, each by itself.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import close
from jax import lax

import jaxcoll as jc

N, AXIS = 8, "data"
RNG = np.random.default_rng(0)
X = RNG.standard_normal((16, 4)).astype("f")
Y = np.tanh(X @ RNG.standard_normal((4, 2))).astype("f")
BATCH = {"x": X, "y": Y}
P = {"w": RNG.standard_normal((4, 2)).astype("f") * 0.3, "b": np.zeros(2, "f")}
KEY = jax.random.key_data(jax.random.key(7))
pmean = functools.partial(lax.pmean, axis_name=AXIS)
psum = functools.partial(lax.psum, axis_name=AXIS)


def loss(p, b):
    return jnp.mean((jnp.tanh(b["x"] @ p["w"] + p["b"]) - b["y"]) ** 2)


def descend(p, g, rate=0.1):
    return jax.tree.map(lambda p, g: p - rate * g, p, g)


def by_optax(tx):
    def step(p, b):
        state = tx.init(p)
        for _ in range(2):
            value, grads = pmean(jax.value_and_grad(loss)(p, b))
            more = {"value": value} if isinstance(tx, optax.GradientTransformationExtraArgs) else {}
            updates, state = tx.update(grads, state, p, **more)
            p = optax.apply_updates(p, updates)
        return p, value

    return step


def batch_norm(means):
    """By statistics over what `means` takes them of."""

    def step(p, b):
        def normed(p):
            h = b["x"] @ p["w"]
            mean, square = means((h.mean(0), (h**2).mean(0)))
            h = (h - mean) * lax.rsqrt(square - mean**2 + 1e-3) + p["b"]
            return jnp.mean((h - b["y"]) ** 2), (mean, square)

        (_, stats), g = jax.value_and_grad(normed, has_aux=True)(p)
        return descend(p, pmean(g)), pmean(stats)

    return step


def vmapped_batch_norm(p, b):
    def normed(p):
        row = lambda h: (h - lax.pmean(h, "rows")) * lax.rsqrt(lax.pmean(h**2, "rows") + 1e-3)
        h = jax.vmap(row, axis_name="rows")(b["x"] @ p["w"])
        return jnp.mean((h + p["b"] - b["y"]) ** 2)

    return descend(p, pmean(jax.grad(normed)(p)))


def contrastive(p, b):
    def nce(p):
        mine = b["x"] @ p["w"]
        everyone = lax.all_gather(lax.stop_gradient(mine), AXIS, tiled=True)
        logits = mine @ everyone.T
        labels = jnp.arange(2) + 2 * lax.axis_index(AXIS)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    value, g = jax.value_and_grad(nce)(p)
    return descend(p, pmean(g)), pmean(value)


def cross_correlation(p, b):
    def twins(p):
        h = b["x"] @ p["w"]
        return jnp.sum((psum(h.T @ h) / 16 - jnp.eye(2)) ** 2) / N

    return descend(p, pmean(jax.grad(twins)(p)))


def private(p, b):
    one = lambda x, y: jax.grad(loss)(p, {"x": x[None], "y": y[None]})
    grads = jax.vmap(one)(b["x"], b["y"])
    less = jnp.minimum(1, 0.1 / jax.vmap(optax.tree.norm)(grads))
    total = psum(jax.tree.map(lambda g: jnp.tensordot(less, g, 1), grads))
    keys = iter(jax.random.split(jax.random.wrap_key_data(jnp.asarray(KEY)), 2))
    noisy = lambda g: (g + 0.01 * jax.random.normal(next(keys), g.shape)) / 16
    return descend(p, jax.tree.map(noisy, total))


def proximal_policy(p, b):
    old = jax.nn.log_softmax(b["x"] @ p["w"])

    def epoch(state):
        i, q, _ = state
        new = lambda q: jax.nn.log_softmax(b["x"] @ q["w"])
        surrogate = lambda q: -jnp.mean(jnp.exp(new(q) - old) * b["y"])
        q = descend(q, pmean(jax.grad(surrogate)(q)))
        return i + 1, q, pmean(jnp.mean(old - new(q)))

    keeps = lambda s: (s[0] < 4) & (s[2] < 0.5)
    return lax.while_loop(keeps, epoch, (0, jax.tree.map(jnp.asarray, p), jnp.float32(0)))[1:]


def conjugate_gradient(p, b):
    g = pmean(jax.grad(loss)(p, b))

    def product(v):
        h = jax.jvp(lambda p: jax.grad(loss)(p, b), (p,), (v,))[1]
        return jax.tree.map(lambda h, v: h + 0.5 * v, pmean(h), v)

    return jax.scipy.sparse.linalg.cg(product, g, maxiter=5)[0]


def implicit(p, b):
    def solved(p):
        a = b["x"].T @ b["x"] + jnp.eye(4) * (1 + jnp.sum(p["b"] ** 2))
        return jnp.sum(jnp.linalg.solve(a, p["w"]) ** 2) + jnp.linalg.slogdet(a)[1]

    return descend(p, pmean(jax.grad(solved)(p)))


@jax.custom_vjp
def doubled(x):
    return 2 * x


doubled.defvjp(lambda x: (2 * x, x), lambda x, ct: (ct * jnp.ones_like(x) * 2.0,))


def backward(p, b):
    """Derivatives by hand, of what is said to vary."""
    f = lambda p: loss(p, b) + jnp.mean(doubled(b["x"] @ p["w"]))
    value, back = jax.vjp(f, jax.tree.map(lambda x: lax.pcast(x, AXIS, to="varying"), p))
    return pmean(back(jnp.ones_like(value))[0]), pmean(jax.jacrev(f)(p))


TRANSFORMS = {  # whose states are unlike one another's: factors, choices, counts, losses
    "adafactor": optax.adafactor(0.1), "finite": optax.apply_if_finite(optax.adam(0.1), 3),
    "multi steps": optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(),
    "prodigy": optax.contrib.prodigy(0.1),
    "plateau": optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1)),
}  # fmt: skip
GROUPS = [[0, 1, 2, 3], [4, 5, 6, 7]]
STYLES = {f.__name__: f for f in (
    vmapped_batch_norm, contrastive, cross_correlation, private, proximal_policy,
    conjugate_gradient, implicit, backward,
)}  # fmt: skip
STYLES |= {f"optax {name}": by_optax(tx) for name, tx in TRANSFORMS.items()}
STYLES |= {
    "own statistics": batch_norm(lambda means: means),
    "statistics of all": batch_norm(pmean),
    "statistics of groups": batch_norm(functools.partial(pmean, axis_index_groups=GROUPS)),
}


@pytest.mark.usefixtures("types_may_mix")
@pytest.mark.parametrize("style", STYLES)
def test_style_equals_pmap(style):
    rows = jax.tree.map(lambda x: x.reshape(N, 2, *x.shape[1:]), BATCH)
    want = jax.pmap(STYLES[style], axis_name=AXIS, in_axes=(None, 0))(P, rows)
    got = jax.device_get(jc.data_parallel(STYLES[style])(P, BATCH))  # warnings are errors in tests
    for replica in range(N):
        mine = jax.tree.map(lambda x, k=replica: np.asarray(x)[k], want)
        close(got, mine, rtol=2e-5, atol=2e-6)
