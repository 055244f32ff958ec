"""Copies to shared memory of what a step reads once: weights, most keys and values.

A step reads gigabytes once and megabytes again and again: the residual, the pieces of a product,
the weights of norms. In the order of their reading all of it would be gone from L2 before it is
read again; marked to be evicted first, what is read once makes room for itself.
"""

from typing import Any

from jax._src.lib.mlir.dialects import nvvm  # no public name yet
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir

# Of a kernel that calls `copy_once`: in these a copy is an instruction as soon as it is asked for.
SEMANTICS = plgpu.LoweringSemantics.Lane


def copy_once(source: Any, place: Any, barrier: Any, *, interpreted: bool) -> None:
    """`plgpu.copy_gmem_to_smem`, and L2 does not keep the bytes longer than it must.

    Args:
      source, place, barrier: as there.
      interpreted: on a CPU, where there is no such policy.
    """
    plgpu.copy_gmem_to_smem(source, place, barrier)
    if not interpreted:
        _evict_first()


@plgpu.inline_mgpu()
def _evict_first(ctx: Any) -> None:
    """Gives the copy that has just been asked for the policy, which Mosaic has no argument for."""
    *_, copy = ir.InsertionPoint.current.block.operations
    assert isinstance(copy, nvvm.CpAsyncBulkTensorGlobalToSharedClusterOp), copy
    policy = mgpu.utils.inline_ptx(
        "createpolicy.fractional.L2::evict_first.b64 $0, 1.0;",
        result_types=ir.IntegerType.get_signless(64),
    )
    nvvm.cp_async_bulk_tensor_shared_cluster_global(
        copy.dstMem,
        copy.tmaDescriptor,
        copy.coordinates,
        copy.mbar,
        copy.im2colOffsets,
        l2_cache_hint=policy,
        predicate=copy.predicate,
    )
    copy.erase()
