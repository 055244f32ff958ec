"""The angles of rotary position embedding; `pallas_kernels.rotation` turns heads by them.

A partial ("proportional") head turns only the first P/2 pairs of widths, with frequencies over
the whole head width.
"""

import jax
import jax.numpy as jnp
import numpy as np

from carat_jax.config import LayerSpec


def angles(positions: jax.Array, spec: LayerSpec) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of the P/2 turning pairs of this layer's heads.

    Args:
      positions: int32 [B, T].
      spec: gives H, P and the base theta.

    Returns:
      float32 [B, T, 1, P/2] each: broadcasts over heads.
    """
    pairs = np.arange(spec.rotated // 2)
    frequency = spec.rope_theta ** (-2.0 * pairs / spec.head_dim)
    phase = positions[..., None, None].astype(jnp.float32) * frequency.astype(np.float32)
    return jnp.cos(phase), jnp.sin(phase)
