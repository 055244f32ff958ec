"""Full attention of a few new positions over a cache whose slot is the position."""

import jax

from pallas_kernels import dispatch
from pallas_kernels.global_attention import mosaic, xla
from pallas_kernels.grouping import check

# Best first, all ops at once: `carat bench decode --config 31b`, benchmarks/h200, through XLA
# decode_31b_xla.json (f7b777c), by kernels decode_31b.json (dfe5ad5). Not measured apart.
IMPLEMENTATIONS = {"mosaic": mosaic.global_attention, "xla": xla.global_attention}


def global_attention(
    q: jax.Array,
    k: jax.Array | None,
    v: jax.Array,
    length: jax.Array,
    *,
    q_rotated: jax.Array | None = None,
    k_rotated: jax.Array | None = None,
    reread: bool = False,
    implementation: str | None = None,
) -> jax.Array:
    """Decode (T = 1) or verify (T > 1) over a global cache, the new positions already written.

    Two forms of cache. Plain: keys and values. Compact, where both come from one projection:
    the key before RoPE is the value times w_k, so only the P rotated widths are stored beside
    the values, and a score is q · v + q_rotated · k_rotated.

    Args:
      q: [B, T, N, H]. Plain: queries after RoPE. Compact: queries before RoPE times w_k, with
        the rotated widths zeroed. The scale is 1.0.
      k: [B, K, S, H] keys after RoPE; None for the compact form.
      v: [B, K, S, H] values. S a multiple of 64 runs fastest; slots past the newest position
        are masked and need only be finite.
      length: int32 [B], positions before the new ones: query t sits at length + t.
      q_rotated: [B, T, N, P] compact form: the rotated widths of the queries, after RoPE.
      k_rotated: [B, K, S, P] compact form: the rotated widths of the keys, after RoPE.
      reread: another layer reads the same keys and values soon, so they may stay in L2.
      implementation: one of `IMPLEMENTATIONS`; None takes the best that accepts the inputs.

    Returns:
      [B, T, N, H] in the dtype of v. Softmax and accumulation are float32.

    Raises:
      ValueError: shapes that do not fit, both forms or neither given, unknown implementation.
      Unsupported: the named implementation cannot take these shapes.
    """
    check(q, k, v, length, q_rotated, k_rotated)
    return dispatch.run(
        IMPLEMENTATIONS,
        implementation,
        q,
        k,
        v,
        length,
        q_rotated=q_rotated,
        k_rotated=k_rotated,
        reread=reread,
    )
