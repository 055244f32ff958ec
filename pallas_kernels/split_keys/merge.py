"""The end of a call: the blocks meet, and the splits of each query row become one.

They meet at a counter: every block counts itself in when others can read its results, and who has
a row to merge waits for all of them. Counters for each group of splits would not end a call sooner:
the group that is ready last is as late, and its merge still follows.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.split_keys.geometry import Shape, splits_of_row
from pallas_kernels.split_keys.warpgroups import LOWEST, MASKED


def arrive(s: Shape, counter_ref) -> None:
    """What this block wrote to global memory and waited for can be read by those who meet it."""
    _count(s, counter_ref, "release")


def merge_splits(s: Shape, length_ref, partial_ref, mass_ref, out_ref, counter_ref=None) -> None:
    """Merges the splits of this warpgroup's share of the query rows, in the order of the keys.

    Both warpgroups of every block take part; no block has two rows before all have one.

    Args:
      counter_ref: where all blocks arrive before their results are read; None if they have.
    """
    worker = lax.axis_index("block") + lax.axis_index("warpgroup") * s.blocks
    workers = 2 * s.blocks
    N = s.K * s.G
    vector = plgpu.Layout.WG_STRIDED((s.H,), vec_size=s.H // 128)
    together = min(s.splits, 33)  # read at once, to pay the latency once

    def row(n, _):
        index = worker + n * workers

        @pl.when(index < _query_rows(s))
        def _():
            b, rest = lax.div(index, s.T * N), lax.rem(index, s.T * N)
            t, head = lax.div(rest, N), lax.rem(rest, N)
            k, r = lax.div(head, s.G), t * s.G + lax.rem(head, s.G)
            group = (b * s.K + k) * s.row_blocks + lax.div(r, s.rows)
            start, splits = splits_of_row(s, length_ref[b], t)
            if counter_ref is not None:
                pl.when(n == 0)(lambda: _meet(s, counter_ref))

            def some(i, carry):
                top, total, out = carry
                first, end = start + i * together, start + splits
                js = [first + j for j in range(together)]
                # Beyond the last split, the last is read again and weighs nothing.
                at = [jnp.minimum(j, end - 1) for j in js]
                masses = [mass_ref[group, a, lax.rem(r, s.rows)] for a in at]
                parts = [
                    plgpu.load(partial_ref.at[group, a, lax.rem(r, s.rows)], layout=vector)
                    for a in at
                ]
                masses = [jnp.where(j < end, m, MASKED) for j, m in zip(js, masses, strict=True)]
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
            if together == s.splits:
                _, total, out = some(0, begin)
            else:
                rounds = lax.div(splits + together - 1, together)
                _, total, out = lax.fori_loop(0, rounds, some, begin)
            out_ref[b, t, head] = (out / total).astype(jnp.bfloat16)

        return 0

    lax.fori_loop(0, -(-_query_rows(s) // workers), row, 0)


def _query_rows(s: Shape) -> int:
    return s.B * s.T * s.K * s.G


def _waiting(s: Shape) -> int:
    """Warpgroups that have rows to merge."""
    return min(_query_rows(s), 2 * s.blocks)


def _meet(s: Shape, counter_ref) -> None:
    """Returns when the results of all blocks can be read."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def wait(ctx, counter):
        pointer = mgpu.utils.memref_ptr(counter)
        semaphore = mgpu.utils.SemaphoreRef(pointer)
        semaphore.wait(s.blocks, decrement=False, memory_scope="gpu")

    wait(counter_ref)
    # Nobody reads anything because of this count, so it need not come after any write.
    _count(s, counter_ref, "relaxed")


def _count(s: Shape, counter_ref, order: str) -> None:
    """The last of those who wait, having met, finds the counter at its end: it wraps to zero."""
    end = s.blocks + _waiting(s) - 1

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def count(ctx, counter):
        mgpu.utils.warpgroup_barrier()
        mgpu.utils.inline_ptx(
            f"red.{order}.gpu.global.inc.u32 [$0], $1;",
            mgpu.utils.memref_ptr(counter),
            mgpu.utils.c(end, mgpu.utils.ir.IntegerType.get_signless(32)),
            predicate=mgpu.utils.single_thread_predicate(mgpu.utils.ThreadSubset.WARPGROUP),
            has_side_effects=True,
        )

    count(counter_ref)
