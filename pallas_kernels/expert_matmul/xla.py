"""expert_matmul as one small product a tile: the reference, and the CPU path."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.expert_matmul.tiles import cut, tile_height

# Tiles computed at once, so matrices of w copied at once.
BATCH = 8


def expert_matmul(
    x: jax.Array, w: jax.Array, index: jax.Array, *, absent: bool = False
) -> jax.Array:
    """See `pallas_kernels.expert_matmul.expert_matmul`."""
    n, (E, D, *_, F) = len(index), w.shape
    x = jnp.broadcast_to(x, (n, D))
    height = tile_height(n, E)
    tiles = cut(index, height, E, absent)
    blocks = jnp.pad(x, ((0, -n % height), (0, 0))).reshape(-1, height, D)
    precision = lax.Precision.HIGHEST if w.dtype == jnp.float32 else None

    @jax.checkpoint  # or the gradient would keep a copy of a matrix for every tile
    def product(first: jax.Array) -> jax.Array:
        y = jnp.matmul(
            blocks[first // height],
            w[index[first]].reshape(D, -1),
            precision=precision,
            preferred_element_type=jnp.float32,
        )
        if w.ndim == 4:
            y = jax.nn.gelu(y[:, :F], approximate=True) * y[:, F:]
        return y.astype(x.dtype)

    y = lax.map(product, tiles.first, batch_size=BATCH)
    return y[tiles.of_row, jnp.arange(n) % height]
