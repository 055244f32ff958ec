"""attention_inputs in plain JAX: the reference, the CPU path and that of prefill."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import cache_slots, rotation
from pallas_kernels.attention_inputs.form import AttentionInputs, is_compact
from pallas_kernels.partial_sums import PartialSums, summed


def attention_inputs(
    y: jax.Array | PartialSums,
    q_norm: jax.Array,
    k_norm: jax.Array | None,
    cos: jax.Array,
    sin: jax.Array,
    length: jax.Array,
    new: jax.Array,
    *,
    group: int,
    eps: float,
    ring: bool,
    k: jax.Array | None = None,
    v: jax.Array | None = None,
    k_rotated: jax.Array | None = None,
) -> AttentionInputs:
    """See `pallas_kernels.attention_inputs.attention_inputs`."""
    y = summed(y)
    B, T, K, heads, H = y.shape
    dtype, rotated = y.dtype, 2 * cos.shape[-1]
    compact = is_compact(heads - group, k_norm)
    y = y.astype(jnp.float32)
    unit = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)  # one pass for all heads

    def turned(x: jax.Array) -> jax.Array:
        if compact:
            return rotation.rotate(rotation.rotated_widths(x, rotated), cos, sin)
        return rotation.rotate_head(x, cos, sin)

    q = unit[:, :, :, :group] * q_norm.astype(jnp.float32)
    q = q.reshape(B, T, K * group, H)
    q_rotated = None
    if compact:
        q_rotated = turned(q).astype(dtype)
        q = rotation.without_rotated_widths(q * k_norm.astype(jnp.float32), rotated)
    else:
        q = turned(q)
    out = AttentionInputs(q=q.astype(dtype), q_rotated=q_rotated)
    if heads == group:
        return out

    def stored(cache: jax.Array | None, rows: jax.Array) -> jax.Array:
        rows = rows.astype(dtype).transpose(0, 2, 1, 3)
        rows = jnp.where((jnp.arange(T) < new[:, None])[:, None, :, None], rows, 0)
        return rows if cache is None else cache_slots.append(cache, rows, length, ring=ring)

    keys = turned(unit[:, :, :, group] * k_norm.astype(jnp.float32))
    out = out._replace(v=stored(v, unit[:, :, :, -1]))
    if compact:
        return out._replace(k_rotated=stored(k_rotated, keys))
    return out._replace(k=stored(k, keys))
