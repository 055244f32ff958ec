"""Writing rows into the slots of a cache [B, K, S, width]."""

import jax
import jax.numpy as jnp


def append(cache: jax.Array, rows: jax.Array, length: jax.Array, *, ring: bool) -> jax.Array:
    """Writes T new positions; positions past the end of a global cache are dropped.

    A ring of R slots takes T <= R - W + 1 this way: rows that turn out to be rejected destroy
    nothing that a window of W still sees.

    Args:
      cache: [B, K, S, width], to be donated through.
      rows: [B, K, T, width], stored in the dtype of the cache.
      length: int32 [B], positions before the new ones.
      ring: position p has slot p mod S; else slot p.
    """
    slot = length[:, None] + jnp.arange(rows.shape[2])
    return write(cache, rows, slot % cache.shape[2] if ring else slot)


def write(cache: jax.Array, rows: jax.Array, slot: jax.Array) -> jax.Array:
    """Puts rows[b, :, t] into slot[b, t], of int32 [B, T]; slots past the end are dropped."""
    B, K = cache.shape[:2]
    b, k = jnp.arange(B)[:, None, None], jnp.arange(K)[None, :, None]
    at = cache.at[b, k, slot[:, None]]
    return at.set(rows.astype(cache.dtype), mode="drop", unique_indices=True)
