"""The end of a call: all blocks meet, and the splits of each query row become one."""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.split_keys.geometry import Shape, splits_of_row
from pallas_kernels.split_keys.warpgroups import LOWEST, MASKED


def merge_splits(s: Shape, length_ref, partial_ref, mass_ref, out_ref):
    """Merges the splits of this block's share of the query rows, in the order of the keys."""
    N = s.K * s.G
    count = s.B * s.T * N
    vector = plgpu.Layout.WG_STRIDED((s.H,), vec_size=s.H // 128)
    together = min(s.splits, 33)  # read at once, to pay the latency once

    def row(n, _):
        index = lax.axis_index("block") + n * s.blocks

        @pl.when(index < count)
        def _():
            b, rest = index // (s.T * N), lax.rem(index, s.T * N)
            t, head = rest // N, lax.rem(rest, N)
            k, r = head // s.G, t * s.G + lax.rem(head, s.G)
            group = (b * s.K + k) * s.row_blocks + r // s.rows
            start, splits = splits_of_row(s, length_ref[b], t)

            def some(i, carry):
                top, total, out = carry
                js = [i * together + j for j in range(together)]
                # Beyond the last split, the last is read again and weighs nothing.
                at = [start + jnp.minimum(j, splits - 1) for j in js]
                masses = [mass_ref[group, a, lax.rem(r, s.rows)] for a in at]
                parts = [
                    plgpu.load(partial_ref.at[group, a, lax.rem(r, s.rows)], layout=vector)
                    for a in at
                ]
                masses = [jnp.where(j < splits, m, MASKED) for j, m in zip(js, masses, strict=True)]
                new_top = functools.reduce(jnp.maximum, masses, top)
                weights = [jnp.exp2(m - new_top) for m in masses]
                shrink = jnp.exp2(top - new_top)
                total, out = total * shrink, out * shrink
                for w, part in zip(weights, parts, strict=True):
                    total += w
                    out += part.astype(jnp.float32) * w
                return new_top, total, out

            zeros = plgpu.layout_cast(jnp.zeros((s.H,), jnp.float32), vector)
            begin = (jnp.float32(LOWEST), jnp.float32(0.0), zeros)
            _, total, out = lax.fori_loop(0, (splits + together - 1) // together, some, begin)
            out_ref[b, t, head] = (out / total).astype(jnp.bfloat16)

        return 0

    lax.fori_loop(0, -(-count // s.blocks), row, 0)


def meet(s: Shape, counter_ref) -> None:
    """Returns when the results of all blocks can be read."""
    _count(s, counter_ref)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def wait(ctx, counter):
        pointer = mgpu.utils.memref_ptr(counter)
        semaphore = mgpu.utils.SemaphoreRef(pointer)
        semaphore.wait(s.blocks, decrement=False, memory_scope="gpu")

    wait(counter_ref)


def leave(s: Shape, counter_ref) -> None:
    """The last block to leave finds the counter at its end, where it wraps to zero."""
    _count(s, counter_ref)


def _count(s: Shape, counter_ref) -> None:
    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def count(ctx, counter):
        mgpu.utils.warpgroup_barrier()
        mgpu.utils.inline_ptx(
            "red.release.gpu.global.inc.u32 [$0], $1;",
            mgpu.utils.memref_ptr(counter),
            mgpu.utils.c(2 * s.blocks - 1, mgpu.utils.ir.IntegerType.get_signless(32)),
            predicate=mgpu.utils.single_thread_predicate(mgpu.utils.ThreadSubset.WARPGROUP),
            has_side_effects=True,
        )

    count(counter_ref)
