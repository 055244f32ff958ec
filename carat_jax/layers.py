"""The small parts that every module of the model uses: weights, products, norms."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from carat_jax.config import GemmaConfig


def weight(module: nn.Module, name: str, shape: tuple[int, ...], config: GemmaConfig) -> jax.Array:
    """Declares a weight in the model's dtype. `init_params` and `load_params` give the values."""
    return module.param(name, nn.initializers.zeros, shape, jnp.dtype(config.dtype))


def linear(subscripts: str, x: jax.Array, w: jax.Array) -> jax.Array:
    """An einsum in the dtype of w, accumulated in float32; float32 keeps full precision."""
    precision = lax.Precision.HIGHEST if w.dtype == jnp.float32 else None
    return jnp.einsum(subscripts, x.astype(w.dtype), w, precision=precision)


def linear_f32(subscripts: str, x: jax.Array, w: jax.Array) -> jax.Array:
    """`linear` whose result stays in float32 (logits, routers)."""
    precision = lax.Precision.HIGHEST if w.dtype == jnp.float32 else None
    return jnp.einsum(
        subscripts, x.astype(w.dtype), w, precision=precision, preferred_element_type=jnp.float32
    )


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
