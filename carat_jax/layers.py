"""The small parts that every module of the model uses: weights, products, norms."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from carat_jax.config import GemmaConfig

SMALL_MATRIX = 2**24  # weights


def weight(module: nn.Module, name: str, shape: tuple[int, ...], config: GemmaConfig) -> jax.Array:
    """Declares a weight in the model's dtype. `init_params` and `load_params` give the values."""
    return module.param(name, nn.initializers.zeros, shape, jnp.dtype(config.dtype))


def linear(x: jax.Array, w: jax.Array, out: DTypeLike | None = None) -> jax.Array:
    """x [..., D] times w [D, ...]: the last axis of x against the first of w.

    Accumulated in float32, returned in the dtype of w unless `out` says otherwise; float32 weights
    keep full precision. Both sides go in as plain matrices: given more axes, XLA may choose to
    transpose the whole weight at every step.
    """
    D = w.shape[0]
    y = product(x.astype(w.dtype).reshape(-1, D), w.reshape(D, -1), out or w.dtype)
    return y.reshape(*x.shape[:-1], *w.shape[1:])


def product(x: jax.Array, w: jax.Array, out: DTypeLike) -> jax.Array:
    """Matrix product of x [M, D] and w [D, F], accumulated in float32, returned in `out`.

    A single row meets a small matrix as one of 8: for a row alone XLA takes kernels that are
    slower on an H200 (E4B's decode step: 5.1 ms; 4.3 with every product padded). Large matrices
    are left alone: padding them too, so that decoding and verifying run the same products, cost
    5 % of 31B's step (16.65 against 15.85 ms). So one row and several agree up to rounding only.
    """
    M = x.shape[0]
    if M == 1 and w.size <= SMALL_MATRIX:
        x = jnp.pad(x, ((0, 7), (0, 0)))
    precision = lax.Precision.HIGHEST if w.dtype == jnp.float32 else None
    return jnp.matmul(x, w, precision=precision, preferred_element_type=out)[:M]


def rms_norm(x: jax.Array, w: jax.Array | None, eps: float) -> jax.Array:
    """x / rms(x) over the last axis, times w (not 1 + w); float32 in and out.

    The caller casts the result, so that what follows may start from the unrounded value.
    """
    x = x.astype(jnp.float32)
    x = x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return x if w is None else x * w.astype(jnp.float32)


def gelu(x: jax.Array) -> jax.Array:
    """The tanh form of GELU, in float32."""
    return jax.nn.gelu(x.astype(jnp.float32), approximate=True)
