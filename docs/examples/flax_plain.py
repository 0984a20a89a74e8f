"""Train a small flax transformer with scanned layers on one device."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

LAYERS, WIDTH, HEADS, LENGTH, VOCABULARY = 3, 16, 2, 12, 32


class Block(nn.Module):
    """A transformer block: attention and a feed-forward network."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Apply the block to `x` of shape (texts, length, width)."""
        normed = nn.LayerNorm()(x)
        mask = nn.make_causal_mask(x[..., 0])
        x = x + nn.MultiHeadDotProductAttention(HEADS)(normed, normed, mask=mask)
        return x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x))))


def initial_embedding() -> jax.Array:
    """Return the embedding table, one row per token."""
    return 0.02 * jax.random.normal(jax.random.key(0), (VOCABULARY, WIDTH))


def initial_blocks() -> Any:
    """Return the parameters of all blocks, stacked."""
    x, keys = jnp.zeros((1, LENGTH, WIDTH)), jax.random.split(jax.random.key(1), LAYERS)
    return jax.jit(jax.vmap(lambda key: Block().init(key, x)["params"]))(keys)


def loss(params: Any, tokens: jax.Array) -> jax.Array:
    """Return the mean cross-entropy of next-token prediction."""
    embedding = params["embedding"]
    x = embedding[tokens[:, :-1]]

    def block(x: jax.Array, weights: Any) -> tuple[Any, None]:
        return Block().apply({"params": weights}, x), None

    x, _ = jax.lax.scan(block, x, params["blocks"])
    logits = x @ embedding.T
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def train(steps: int) -> list[float]:
    """Train, and return the loss of every step."""
    optimizer = optax.adamw(1e-2)

    @jax.jit
    def step(params: Any, state: Any, tokens: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(params, tokens)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    params = {"embedding": initial_embedding(), "blocks": initial_blocks()}
    state, losses = optimizer.init(params), []
    for i in range(steps):
        first = jax.random.randint(jax.random.key(i), (16, 1), 0, VOCABULARY)
        tokens = (first + jnp.arange(LENGTH + 1)) % VOCABULARY
        params, state, value = step(params, state, tokens)
        losses.append(float(value))
    return losses


if __name__ == "__main__":
    print(train(50))
