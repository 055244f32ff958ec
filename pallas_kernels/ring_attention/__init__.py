"""Sliding-window attention of a few new positions over a ring of recent keys and values."""

import jax

from pallas_kernels import dispatch
from pallas_kernels.grouping import check
from pallas_kernels.ring_attention import mosaic, xla

# Best first, all ops at once: `carat bench decode --config 31b`, benchmarks/h200, through XLA
# decode_31b_xla.json (f7b777c), by kernels decode_31b.json (dfe5ad5). Not measured apart.
IMPLEMENTATIONS = {"mosaic": mosaic.ring_attention, "xla": xla.ring_attention}


def ring_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    length: jax.Array,
    *,
    window: int,
    reread: bool = False,
    implementation: str | None = None,
) -> jax.Array:
    """Decode (T = 1) or verify (T > 1) over a ring, as it lies: no gather, no rotation.

    The ring holds position p in slot p mod R, the T new positions included. What position a slot
    holds follows from `length` alone, so slots written by a rejected proposal need no cleaning:
    they are masked by position. Their contents must be finite.

    Args:
      q: [B, T, N, H] queries, RoPE applied; the scale is 1.0.
      k, v: [B, K, R, H] the ring, R >= window + T - 1. R a multiple of 64 runs fastest.
      length: int32 [B], positions before the new ones: query t sits at length + t.
      window: W, the keys that a query sees, itself included.
      reread: another layer reads the same keys and values soon, so they may stay in L2.
      implementation: one of `IMPLEMENTATIONS`; None takes the best that accepts the inputs.

    Returns:
      [B, T, N, H] in the dtype of v. Softmax and accumulation are float32.

    Raises:
      ValueError: shapes that do not fit, a ring too small for T, an unknown implementation.
      Unsupported: the named implementation cannot take these shapes.
    """
    check(q, k, v, length)
    T, R = q.shape[1], v.shape[2]
    if window < 1 or window + T - 1 > R:
        raise ValueError(
            f"a ring of {R} slots cannot hold window {window} and {T} new positions: it needs "
            f"R >= {window + T - 1}"
        )
    return dispatch.run(
        IMPLEMENTATIONS, implementation, q, k, v, length, window=window, reread=reread
    )
