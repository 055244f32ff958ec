"""What the ops share: rows grouped by KV head, masked softmax, shape checks."""

import jax
import jax.numpy as jnp
from jax import lax

# Finite, so that a row with no key in sight (padding) gives numbers instead of NaN.
MASKED = -1e30


def to_rows(q: jax.Array, num_kv_heads: int) -> jax.Array:
    """[B, T, N, H] -> [B, K, G·T, H]: all queries that read a KV head become rows of one product.

    Row g·T + t is query head k·G + g at new position t.
    """
    B, T, N, H = q.shape
    G = N // num_kv_heads
    q = q.reshape(B, T, num_kv_heads, G, H).transpose(0, 2, 3, 1, 4)
    return q.reshape(B, num_kv_heads, G * T, H)


def from_rows(rows: jax.Array, T: int) -> jax.Array:
    """[B, K, G·T, H] -> [B, T, N, H]: the inverse of `to_rows`."""
    B, K, GT, H = rows.shape
    rows = rows.reshape(B, K, GT // T, T, H).transpose(0, 3, 1, 2, 4)
    return rows.reshape(B, T, K * (GT // T), H)


def mask_rows(mask: jax.Array, G: int) -> jax.Array:
    """[B, T, S] -> [B, 1, G·T, S]: a mask over positions, for the rows of `to_rows`."""
    B, T, S = mask.shape
    return jnp.broadcast_to(mask[:, None, None], (B, 1, G, T, S)).reshape(B, 1, G * T, S)


def product(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """An einsum accumulated and returned in float32; float32 operands keep full precision."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.einsum(subscripts, a, b, preferred_element_type=jnp.float32, precision=precision)


def attend(scores: jax.Array, mask: jax.Array, v: jax.Array) -> jax.Array:
    """Softmax in float32 over masked scores [B, K, M, S], times v [B, K, S, H]: [B, K, M, H]."""
    p = jax.nn.softmax(jnp.where(mask, scores, MASKED), axis=-1)
    return product("bkms,bksh->bkmh", p.astype(v.dtype), v).astype(v.dtype)


def check(
    q: jax.Array,
    k: jax.Array | None,
    v: jax.Array,
    length: jax.Array,
    q_rotated: jax.Array | None = None,
    k_rotated: jax.Array | None = None,
) -> None:
    """Refuses inputs that no implementation could mean. Shapes as in `global_attention`.

    Raises:
      ValueError: naming the arrays and their shapes; also unless exactly one of the two forms of
        cache is given.
    """
    compact = k_rotated is not None
    if (q_rotated is not None) != compact or (k is not None) == compact:
        raise ValueError(
            "give either k (plain cache), or q_rotated and k_rotated (compact cache) with k=None"
        )
    if q.ndim != 4 or v.ndim != 4:
        raise ValueError(f"q {q.shape} must be [B, T, N, H] and v {v.shape} [B, K, S, H]")
    B, T, N, H = q.shape
    if v.shape[0] != B or v.shape[3] != H or N % v.shape[1] or T < 1:
        raise ValueError(
            f"q {q.shape} [B, T, N, H] and v {v.shape} [B, K, S, H]: B and H must agree, K must "
            "divide N, T must be at least 1"
        )
    if length.shape != (B,) or not jnp.issubdtype(length.dtype, jnp.integer):
        raise ValueError(f"length {length.shape} {length.dtype} must be integer [B] = [{B}]")
    if k is not None and k.shape != v.shape:
        raise ValueError(f"k {k.shape} and v {v.shape} must have the same shape")
    if compact and (k_rotated.ndim != 4 or k_rotated.shape[:3] != v.shape[:3]):
        raise ValueError(f"k_rotated {k_rotated.shape} and v {v.shape} must agree in [B, K, S]")
    if compact and q_rotated.shape != (B, T, N, k_rotated.shape[3]):
        raise ValueError(
            f"q_rotated {q_rotated.shape} must agree with q {q.shape} in [B, T, N] and with "
            f"k_rotated {k_rotated.shape} in P"
        )
