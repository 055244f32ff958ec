"""Weights brought into the L2 cache while a small kernel keeps device memory idle."""

from typing import Any

import jax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

CHUNK = 16 * 1024  # bytes of one instruction
# Half of the 50 MB of an H200: what is read meanwhile must not push it out again.
MOST = 24 * 1024 * 1024


def prefetch(ref: Any, array: jax.Array, blocks: int, most: int) -> None:
    """Asks for this block's share of an array, in the calling warpgroup.

    The pieces are spread evenly over the array: then every block of the product that reads it
    finds as much of its own part, however that product cuts it.

    Args:
      ref: the array in global memory, row-major.
      array: its shape and dtype.
      blocks: thread blocks of the (one-dimensional) grid.
      most: bytes that all blocks ask for together.
    """
    size = array.size * array.dtype.itemsize
    rounds = min(size, most, MOST) // (CHUNK * blocks)
    if not rounds:
        return
    stride = size // (rounds * blocks) // 128 * 128

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def ask(ctx, ref):
        pointer = mgpu.utils.memref_ptr(ref)
        predicate = mgpu.utils.single_thread_predicate(mgpu.utils.ThreadSubset.WARPGROUP)
        for i in range(rounds):
            mgpu.utils.inline_ptx(
                "{ .reg .b32 block; .reg .b64 offset; mov.u32 block, %ctaid.x; "
                f"mad.wide.u32 offset, block, {stride}, {i * blocks * stride}; "
                "add.s64 offset, offset, $0; "
                f"@$1 cp.async.bulk.prefetch.L2.global [offset], {CHUNK}; }}",
                pointer,
                predicate,
                has_side_effects=True,
            )

    ask(ref)
