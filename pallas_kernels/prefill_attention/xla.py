"""prefill_attention in blocks: the reference, and the CPU path.

Global layers walk the key axis in blocks with a running softmax, as many blocks as hold live
keys (the bound is read on the device), so time follows the context and one compilation serves
every length. Windowed layers cut the queries instead: a block of queries sees a short span of
keys known at trace time, so time does not grow with the context.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.grouping import MASKED, attend, from_rows, mask_rows, product, to_rows

QUERY_BLOCK = 512
KEY_BLOCK = 1024


def prefill_attention(
    q: jax.Array,
    k: jax.Array | None,
    v: jax.Array,
    length: jax.Array,
    *,
    window: int | None = None,
    q_rotated: jax.Array | None = None,
    k_rotated: jax.Array | None = None,
) -> jax.Array:
    """See `pallas_kernels.prefill_attention.prefill_attention`."""
    if window is not None:
        return _windowed(q, k, v, length, window)
    if v.shape[2] <= KEY_BLOCK:
        scores, mask = _block(q, k, v, length, q_rotated, k_rotated, 0)
        return from_rows(attend(scores, mask, v), q.shape[1])
    return _blockwise(q, k, v, length, q_rotated, k_rotated)


def _block(q, k, v, length, q_rotated, k_rotated, first):
    """Scores [B, K, G·T, s] and mask of one block of keys, whose first is at position `first`."""
    T, (_, K, s, _) = q.shape[1], v.shape
    scores = product("bkmh,bksh->bkms", to_rows(q, K), v if k is None else k)
    if k_rotated is not None:
        scores += product("bkmp,bksp->bkms", to_rows(q_rotated, K), k_rotated)
    position = length[:, None] + jnp.arange(T)
    mask = first + jnp.arange(s) <= position[:, :, None]
    return scores, mask_rows(mask, q.shape[2] // K)


def _blockwise(q, k, v, length, q_rotated, k_rotated):
    """Running softmax over blocks of keys; the last block overlaps where S is no multiple."""
    B, T, N, H = q.shape
    _, K, S, _ = v.shape
    M = N // K * T
    blocks = jnp.minimum(-(-S // KEY_BLOCK), (jnp.max(length) + T - 1) // KEY_BLOCK + 1)

    def take(cache, first):
        return None if cache is None else lax.dynamic_slice_in_dim(cache, first, KEY_BLOCK, 2)

    def body(i, carry):
        top, total, out = carry
        first = jnp.minimum(i * KEY_BLOCK, S - KEY_BLOCK)
        v_block = take(v, first)
        scores, mask = _block(
            q, take(k, first), v_block, length, q_rotated, take(k_rotated, first), first
        )
        mask &= (first + jnp.arange(KEY_BLOCK)) >= i * KEY_BLOCK  # not seen by the block before
        scores = jnp.where(mask, scores, MASKED)
        new_top = jnp.maximum(top, scores.max(-1))
        p = jnp.where(mask, jnp.exp(scores - new_top[..., None]), 0.0)
        scale = jnp.exp(top - new_top)
        out = out * scale[..., None] + product("bkms,bksh->bkmh", p.astype(v.dtype), v_block)
        return new_top, total * scale + p.sum(-1), out

    start = (
        jnp.full((B, K, M), MASKED, jnp.float32),
        jnp.zeros((B, K, M), jnp.float32),
        jnp.zeros((B, K, M, H), jnp.float32),
    )
    # Without the barrier XLA makes the zeros of every layer beforehand and keeps them all.
    q, start = lax.optimization_barrier((q, start))
    _, total, out = lax.fori_loop(0, blocks, body, start)
    return from_rows((out / total[..., None]).astype(v.dtype), T)


def _windowed(q, k, v, length, window):
    T, (_, K, S, _) = q.shape[1], v.shape
    past = S - T
    outputs = []
    for t in range(0, T, QUERY_BLOCK):
        end = min(t + QUERY_BLOCK, T)
        low = max(0, (past + t - (window - 1)) // 64 * 64)
        high = past + end
        key = jnp.arange(low, high)  # index; position = length - past + index
        age = (past + jnp.arange(t, end))[:, None] - key  # [t, s]
        seen = (age >= 0) & (age < window)
        mask = seen & (length[:, None, None] - past + key >= 0)  # [B, t, s]
        scores = product("bkmh,bksh->bkms", to_rows(q[:, t:end], K), k[:, :, low:high])
        rows = attend(scores, mask_rows(mask, q.shape[2] // K), v[:, :, low:high])
        outputs.append(from_rows(rows, end - t))
    return jnp.concatenate(outputs, axis=1)
