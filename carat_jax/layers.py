"""The small parts that every module of the model uses: weights, products, norms."""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from carat_jax.config import GemmaConfig
from carat_jax.sharding import MODEL
from pallas_kernels import (
    PartialSums,
    residual_norm,
    residual_norm_matmul,
    skinny_matmul,
    summed,
)


def weight(module: nn.Module, name: str, shape: tuple[int, ...], config: GemmaConfig) -> jax.Array:
    """Declares a weight in the model's dtype. `init_params` and `load_params` give the values."""
    return module.param(name, nn.initializers.zeros, shape, jnp.dtype(config.dtype))


def linear(
    x: jax.Array,
    w: jax.Array,
    out: DTypeLike | None = None,
    *,
    transposed: bool = False,
    partial: bool = False,
) -> jax.Array | PartialSums:
    """x [..., D] times w [D, ...]: the last axis of x against the first of w.

    Accumulated in float32, returned in the dtype of w unless `out` says otherwise; float32 weights
    keep full precision. Both sides go in as plain matrices: given more axes, XLA may choose to
    transpose the whole weight at every step.

    Args:
      transposed: w is [F, D].
      partial: whoever reads the result takes it in pieces, too.
    """
    D = x.shape[-1]
    rows = x.astype(w.dtype).reshape(-1, D)
    flat = w if transposed else w.reshape(D, -1)
    y = skinny_matmul(rows, flat, out=out or w.dtype, transposed=transposed, partial=partial)
    return y.reshape(*x.shape[:-1], *(w.shape[:1] if transposed else w.shape[1:]))


def linear_share(x: jax.Array, w: jax.Array, shards: int) -> jax.Array | PartialSums:
    """`linear` along an axis that is cut over devices: what one of them has of it, for `total`."""
    return linear(x, w, None if shards == 1 else jnp.float32, partial=True)


def total(
    shards: int, dtype: DTypeLike, *shares: jax.Array | PartialSums
) -> tuple[jax.Array | PartialSums, ...]:
    """Adds up what the devices of the `model` axis have of some products, in one message.

    Args:
      shards: how many devices. 1: the shares are the whole, and returned as they are.
      dtype: of the sums, which are rounded to it once.
      shares: float32 [..., D] each.
    """
    if shards == 1:
        return shares
    joined = jnp.concatenate([summed(y) for y in shares], axis=-1)
    return tuple(jnp.split(lax.psum(joined, MODEL).astype(dtype), len(shares), axis=-1))


def whole(shards: int, x: jax.Array) -> jax.Array:
    """x on every device of the `model` axis, of which each has a part of its last axis."""
    return x if shards == 1 else lax.all_gather(x, MODEL, axis=x.ndim - 1, tiled=True)


class Entry(NamedTuple):
    """How the next part of the model reads the residual.

    Attributes:
      norm: [D], weight of the norm under which it is read.
      matrix: [D, ...], by which the normed residual is multiplied; None: it is read itself.
    """

    norm: jax.Array
    matrix: jax.Array | None


def add_and_enter(
    h: jax.Array | None,
    y: jax.Array | PartialSums,
    w: jax.Array | None,
    entry: Entry,
    eps: float,
    scale: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | PartialSums]:
    """Adds the normed output y [..., D] of a sublayer to the residual h.

    Args:
      h: [..., D]; None where the residual begins, with y itself.
      w: [D] of the norm of y; None with h.
      entry: of what reads the sum next.
      scale: [1], multiplies the sum; None = 1.

    Returns:
      The new residual, and what its reader reads of it.
    """
    if entry.matrix is None:
        return residual_norm(h, y, w, entry.norm, eps=eps, scale=scale)
    D, shape = y.shape[-1], entry.matrix.shape[1:]
    new, product = residual_norm_matmul(
        h if h is None else h.reshape(-1, D),
        y.reshape(-1, D),
        w,
        entry.norm,
        entry.matrix.reshape(D, -1),
        eps=eps,
        out=entry.matrix.dtype,
        scale=scale,
        partial=True,
    )
    return new.reshape(y.shape), product.reshape(*y.shape[:-1], *shape)


def rms_norm(x: jax.Array, w: jax.Array | None, eps: float) -> jax.Array:
    """x / rms(x) over the last axis, times w (not 1 + w); float32 in and out.

    The caller casts the result, so that what follows may start from the unrounded value.
    """
    x = x.astype(jnp.float32)
    x = x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return x if w is None else x * w.astype(jnp.float32)
