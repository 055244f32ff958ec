"""Turning heads by given angles: rotary position embedding in Gemma 4's half-split layout.

Width d turns with width d + H/2. A head may turn in part: then the first P/2 pairs turn, and the
other widths pass through.
"""

import jax
import jax.numpy as jnp
import numpy as np


def rotated_widths(x: jax.Array, rotated: int) -> jax.Array:
    """[..., H] -> [..., P]: the widths that turn, both halves, side by side."""
    half, pairs = x.shape[-1] // 2, rotated // 2
    return jnp.concatenate([x[..., :pairs], x[..., half : half + pairs]], axis=-1)


def without_rotated_widths(x: jax.Array, rotated: int) -> jax.Array:
    """[..., H] with the widths that turn set to zero."""
    half = x.shape[-1] // 2
    return jnp.where(np.arange(x.shape[-1]) % half < rotated // 2, 0, x)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Turns x [..., P], all of whose widths turn: first half against second half. Float32."""
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def rotate_head(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Turns whole heads x [B, T, N, H]; widths beyond the turning pairs pass through. Float32."""
    half, pairs = x.shape[-1] // 2, cos.shape[-1]
    if pairs == half:
        return rotate(x, cos, sin)
    x = x.astype(jnp.float32)
    turned = rotate(rotated_widths(x, 2 * pairs), cos, sin)
    low, high = jnp.split(turned, 2, axis=-1)
    return jnp.concatenate([low, x[..., pairs:half], high, x[..., half + pairs :]], axis=-1)
