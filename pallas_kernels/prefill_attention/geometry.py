"""What is static about a chunk's attention, where a block works, and its shared memory."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.row_copies import TILED

POSITIONS = 64  # of a block; the M of a matrix instruction
KEYS = 64  # of a tile
SLAB = 256  # output widths of a consumer
PIECE = 64  # widths of one product: a row of 128 bytes, as wide as shared memory is swizzled
CONSUMERS, LOADER = 2, 2  # warpgroups 0 and 1; 2

PAIR = "pair"  # of blocks in a cluster

# Stages of the rings of key and value tiles, by kind of block.
STAGES = {"narrow": (2, 2), "narrow compact": (1, 3), "wide": (1, 1), "wide compact": (1, 2)}


class Form(NamedTuple):
    """What is known while tracing. Letters as in `pallas_kernels`."""

    T: int
    S: int
    G: int
    H: int
    window: int | None
    compact: bool
    interpreted: bool

    @property
    def wide(self) -> bool:
        """Whether the two consumers share one head of width 512."""
        return self.H == CONSUMERS * SLAB

    @property
    def heads(self) -> int:
        """Query heads of a block."""
        return CONSUMERS * SLAB // self.H

    @property
    def cluster(self) -> int:
        """Blocks side by side, of one KV head, that load each tile together.

        The interpreter knows no copies to several blocks.
        """
        return 2 if self.wide and self.G % 2 == 0 and not self.interpreted else 1

    @property
    def pieces(self) -> int:
        return self.H // PIECE

    @property
    def slabs(self) -> int:
        """Slabs of a value tile, and of a key tile in the plain form."""
        return self.H // SLAB

    @property
    def key_slabs(self) -> int:
        return 1 if self.compact else self.slabs

    @property
    def kind(self) -> str:
        return ("wide" if self.wide else "narrow") + (" compact" if self.compact else "")

    @property
    def key_stages(self) -> int:
        return STAGES[self.kind][0]

    @property
    def value_stages(self) -> int:
        return STAGES[self.kind][1]

    def turned_piece(self, piece: int) -> int | None:
        """Which piece of the turned widths stands in for these widths of a head, if any.

        RoPE turns the first widths of each half of a head; there the compact form's q is zero.
        """
        half = self.pieces // 2
        if not self.compact or piece % half:
            return None
        return piece // half

    def scratch(self) -> dict[str, Any]:
        """Shared memory (at most 226 KB of a block's 227) and barriers, as `Scratch`."""
        swizzled = functools.partial(plgpu.SMEM, dtype=jnp.bfloat16, transforms=TILED)
        key_width = 2 * PIECE if self.compact else SLAB
        # In a wide block each consumer scores every other tile: it has barriers of its own, for
        # a barrier must be waited for each time that it completes.
        keys = (CONSUMERS if self.wide else self.key_stages) * self.key_slabs
        values = self.value_stages * self.slabs
        free = functools.partial(plgpu.Barrier, num_arrivals=1 if self.wide else CONSUMERS)
        if self.cluster > 1:
            free = functools.partial(plgpu.ClusterBarrier, collective_axes=(PAIR,))
        scratch = {
            "output_or_queries": plgpu.RefUnion(
                swizzled((self.heads, self.pieces, POSITIONS, PIECE)),
                swizzled((CONSUMERS, POSITIONS, SLAB)),
            ),
            "keys": swizzled((self.key_stages, self.key_slabs, KEYS, key_width)),
            "values": swizzled((self.value_stages, self.slabs, KEYS, SLAB)),
            "queries_full": plgpu.Barrier(num_arrivals=self.heads * self.pieces),
            "keys_full": plgpu.Barrier(num_barriers=keys),
            "keys_free": free(num_barriers=keys),
            "values_full": plgpu.Barrier(num_barriers=values),
            "values_free": free(num_barriers=values),
        }
        if self.wide:
            scratch |= {
                "p": swizzled((CONSUMERS, POSITIONS, KEYS)),
                "by_row": plgpu.SMEM((CONSUMERS, POSITIONS), jnp.float32),
                "p_full": plgpu.Barrier(num_barriers=CONSUMERS),
                "p_free": plgpu.Barrier(num_barriers=CONSUMERS),
                "totals_full": plgpu.Barrier(num_arrivals=CONSUMERS),
            }
        if self.interpreted:
            scratch["sums"] = plgpu.SMEM((CONSUMERS, POSITIONS, SLAB), jnp.float32)
        return scratch


class Scratch(NamedTuple):
    """Shared memory and barriers of a block.

    Attributes:
      queries: [heads, H / 64, positions, 64]; output: [consumers, positions, 256], its successor.
      keys: ring of [slabs, keys, 256], or of [1, keys, 128] turned widths in the compact form.
      values: ring of [slabs, keys, 256].
      …_full, …_free: of each slab of the rings, and of each p.
      p: [consumers, positions, keys] of the tile that each scored last. Wide blocks only, as
        by_row: [consumers, positions], the running maximum that belongs to it, at last the sums.
      sums: the accumulators, where the interpreter has no others.
    """

    output_or_queries: Any
    keys: Any
    values: Any
    queries_full: Any
    keys_full: Any
    keys_free: Any
    values_full: Any
    values_free: Any
    p: Any = None
    by_row: Any = None
    p_full: Any = None
    p_free: Any = None
    totals_full: Any = None
    sums: Any = None

    @property
    def queries(self) -> Any:
        return self.output_or_queries[0]

    @property
    def output(self) -> Any:
        return self.output_or_queries[1]


class Place(NamedTuple):
    """Where a block works: scalars read or computed on the device.

    Attributes:
      b, kv_head, head, position: sequence, KV head, first query head and position in the chunk.
      own: index of the key of the block's first query.
      oldest: index of the first key that may be seen at all.
      first, tiles: the key tiles to walk.
    """

    b: jax.Array
    kv_head: jax.Array
    head: jax.Array
    position: jax.Array
    own: jax.Array
    oldest: jax.Array
    first: jax.Array
    tiles: jax.Array


def place(form: Form, length_ref: Any) -> Place:
    b = lax.axis_index("sequence")
    heads = lax.axis_index("heads")
    if form.cluster > 1:
        heads = heads * form.cluster + lax.axis_index(PAIR)
    head = heads * form.heads
    # Late positions see most keys: they start first.
    position = (form.T // POSITIONS - 1 - lax.axis_index("position")) * POSITIONS
    length = length_ref[b]
    if form.window is None:
        own, oldest, lowest = length + position, jnp.int32(0), jnp.int32(0)
    else:
        past = form.S - form.T
        own, oldest = past + position, jnp.maximum(past - length, 0)
        lowest = jnp.maximum(own - (form.window - 1), oldest)
    first = lax.div(lowest, jnp.int32(KEYS))
    last = jnp.minimum(lax.div(own + (POSITIONS - 1), jnp.int32(KEYS)), form.S // KEYS - 1)
    kv_head = lax.div(head, jnp.int32(form.G))
    return Place(b, kv_head, head, position, own, oldest, first, last - first + 1)
