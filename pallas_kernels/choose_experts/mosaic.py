"""choose_experts on Hopper, in one launch: a row is a block of one warpgroup.

A thread holds a logit (or E / 128 of them) and counts those that come before it. That count is its
place: no sort, and no k rounds of reductions, each of which would wait for the one before. Where it
is below k, the thread writes its own expert to that place of the results. (With one warpgroup in a
block `jnp.max` and `jnp.sum` have their scratch memory to themselves.)

Bytes, 26B-A4B at one token: 128 logits and scales in, 64 bytes out. Comparisons, 128 a thread, are
some 640 instructions for each of the four schedulers, 0.4 µs; two reductions over the warpgroup
are 0.1 µs each. The rest is launch, one round of loads and one of stores. Predicted 2 µs a layer,
where XLA has six kernels of 8.8 µs together; not timed alone. The 22 pieces in which
`expert_inputs` leaves the logits are 11 KB more, all asked for at once.

Row independence: a row meets no other row, and its sum has a fixed order.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dispatch import Unsupported, require_hopper
from pallas_kernels.partial_sums import PartialSums, add_up, pieces
from pallas_kernels.thread_stores import as_int32, store, where_below

THREADS = 128  # of a warpgroup
MOST_EXPERTS = 512  # each is compared with each
SUMS = 4  # that a count is kept in: in one, each addition would wait for the one before


def choose_experts(
    logits: jax.Array | PartialSums, scale: jax.Array, *, k: int, interpret: Any = None
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.choose_experts.choose_experts`.

    Args:
      interpret: `plgpu.InterpretGPUParams()` runs on a CPU.

    Raises:
      Unsupported: another device, E no multiple of 128 or above 512.
    """
    if interpret is None:
        require_hopper()
    E = logits.shape[1]
    if E % THREADS or E > MOST_EXPERTS:
        raise Unsupported(f"{E} experts: takes multiples of {THREADS} up to {MOST_EXPERTS}")
    return tuple(_launch(k, interpret, pieces(logits), scale))


# Under its own jit, so that the many layers of a model trace and lower it once.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _launch(k: int, interpret: Any, logits: jax.Array, scale: jax.Array) -> list[jax.Array]:
    parts, M, E = logits.shape
    layout = plgpu.Layout.WG_STRIDED((E,), vec_size=1)
    store_chosen = _store_chosen(layout, k) if interpret is None else _store_chosen_simulated

    def choose(logits_ref, scale_ref, index_ref, share_ref, keys):
        row = lax.axis_index("row")
        logit = add_up(plgpu.load(logits_ref.at[i, row], layout=layout) for i in range(parts))
        scale = plgpu.load(scale_ref, layout=layout).astype(jnp.float32)
        expert = plgpu.broadcasted_iota(jnp.int32, (E,), 0, layout=layout)
        key = _order(logit)
        keys[...] = key

        def count(step, counts):
            return [total + is_before(step * SUMS + n) for n, total in enumerate(counts)]

        def is_before(other):
            its = keys[other]
            return ((its > key) | ((its == key) & (other < expert))).astype(jnp.int32)

        nobody = plgpu.layout_cast(jnp.zeros((E,), jnp.int32), layout)
        place = sum(lax.fori_loop(0, E // SUMS, count, [nobody] * SUMS, unroll=4))
        share = jnp.where(place < k, jnp.exp(logit - jnp.max(logit)), 0)
        share = share / jnp.sum(share) * scale
        store_chosen(place, share, index_ref.at[row], share_ref.at[row])

    return plgpu.kernel(
        choose,
        out_type=[jax.ShapeDtypeStruct((M, k), dtype) for dtype in (jnp.int32, jnp.float32)],
        grid=(M,),
        grid_names=("row",),
        scratch_types=[plgpu.SMEM((E,), jnp.int32)],
        interpret=interpret,
    )(logits, scale)


def _order(x: jax.Array) -> jax.Array:
    """int32 in the total order of float32, which is that of `lax.top_k`; NaNs have a place in it.

    So every place is taken by one logit, whatever the logits are.
    """
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)


def _store_chosen(layout: Any, k: int) -> Any:
    """store_chosen(place, share of `layout`, index [k], shares [k] in global memory).

    Writes every expert and its share to its place, if that is below k.
    """

    @plgpu.inline_mgpu(arg_types=(layout, layout, plgpu.RefType(), plgpu.RefType()))
    def store_chosen(ctx, place, share, *outs):
        starts = [mgpu.utils.memref_ptr(out) for out in outs]
        places = []
        place.foreach(lambda value, _: places.append(value))
        places = iter(places)

        @share.foreach
        def _(value, index):
            to, (expert,) = next(places), as_int32(index)
            with where_below(to, k):
                for x, start in zip((expert, value), starts, strict=True):
                    store(x, start, to)

    return store_chosen


def _store_chosen_simulated(place, share, index_ref, share_ref):
    chosen = jnp.argsort(place)[: index_ref.shape[0]]
    index_ref[...], share_ref[...] = chosen, share[chosen]
