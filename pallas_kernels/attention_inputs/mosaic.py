"""attention_inputs of a few positions on Hopper, in one launch: a row is a block of one warpgroup.

A row is one head at one position: a query, a key or a value. Its two halves lie in the same
threads, so that RoPE needs no exchange; the sum of squares is all that threads tell each other.
(With one warpgroup in a block `jnp.sum` has its scratch memory to itself.)

Bytes, 31B at T = 1: a local layer has 64 rows of 256, 33 KB in (bfloat16, in one piece) and 33 KB
out; a global one 36 rows of 512, 516 KB in (float32, seven pieces) and 46 KB out. At 4.69 TB/s
that is 0.01 and 0.12 µs, so latency is all there is: launch, one round of loads (the product is
still in L2, the weights of the norms and the angles need not be), one sum over a warpgroup, one
round of stores. Predicted 3 µs a layer, where XLA has several kernels; measured 1.65 within a step.

Row independence: a row meets no other row, and its sums have a fixed order.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention_inputs.form import AttentionInputs, is_compact
from pallas_kernels.dispatch import Unsupported, require_hopper
from pallas_kernels.partial_sums import PartialSums, add_up, pieces
from pallas_kernels.thread_stores import as_int32, store, where_below

BF16 = jnp.bfloat16
THREADS = 128  # of a warpgroup


def attention_inputs(
    y: jax.Array | PartialSums,
    q_norm: jax.Array,
    k_norm: jax.Array | None,
    cos: jax.Array,
    sin: jax.Array,
    length: jax.Array,
    new: jax.Array,
    *,
    group: int,
    eps: float,
    ring: bool,
    k: jax.Array | None = None,
    v: jax.Array | None = None,
    k_rotated: jax.Array | None = None,
    interpret: Any = None,
) -> AttentionInputs:
    """See `pallas_kernels.attention_inputs.attention_inputs`.

    Args:
      interpret: `plgpu.InterpretGPUParams()` runs on a CPU.

    Raises:
      Unsupported: another device or dtype, H not 256 or 512, P = 0, keys without a cache to write
        them to.
    """
    if interpret is None:
        require_hopper()
    _, T, _, heads, H = y.shape
    caches = {"k": k, "v": v, "k_rotated": k_rotated}
    caches = {name: x for name, x in caches.items() if x is not None}
    arrays = (y, q_norm, k_norm, *caches.values())
    dtypes = {jnp.dtype(x.dtype) for x in arrays if x is not None}
    if dtypes != {jnp.dtype(BF16)}:
        raise Unsupported(f"takes bfloat16 only, not {', '.join(sorted(map(str, dtypes)))}")
    if H not in (256, 512) or not cos.shape[-1]:
        raise Unsupported(f"head width {H} must be 256 or 512, and some of it turn")
    if heads > group and not caches:
        raise Unsupported("writes keys and values to caches, and there are none")
    norms = [w for w in (q_norm, k_norm) if w is not None]
    queries, caches = _launch(
        group, is_compact(heads - group, k_norm), ring, eps, interpret, pieces(y), norms, cos, sin,
        length.astype(jnp.int32), new.astype(jnp.int32), caches,
    )  # fmt: skip
    return AttentionInputs(*(by_position(x, T) for x in queries), **caches)


def by_position(x: jax.Array, T: int) -> jax.Array:
    """[B, K, T·G, width] -> [B, T, N, width]. Attention's kernels undo it, so that XLA does not."""
    B, K, rows, width = x.shape
    x = x.reshape(B, K, T, rows // T, width).transpose(0, 2, 1, 3, 4)
    return x.reshape(B, T, K * (rows // T), width)


# Under its own jit, so that the many layers of a model trace and lower it once.
@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _launch(
    G: int,
    compact: bool,
    ring: bool,
    eps: float,
    interpret: Any,
    y: jax.Array,
    norms: list[jax.Array],
    cos: jax.Array,
    sin: jax.Array,
    length: jax.Array,
    new: jax.Array,
    caches: dict[str, jax.Array],
) -> tuple[list[jax.Array], dict[str, jax.Array]]:
    """Queries [B, K, T·G, width], which is the order of the kernels of attention; the caches."""
    pieces, B, T, K, heads, H = y.shape
    half, pairs = H // 2, cos.shape[-1]
    layout = plgpu.Layout.WG_STRIDED((half,), vec_size=half // THREADS)
    store_first = _store_first(layout, pairs) if interpret is None else _store_first_simulated

    def norm_turn_store(
        y_ref, norm_refs, cos_ref, sin_ref, length_ref, new_ref, cache_refs, *q_refs
    ):
        index = lax.axis_index("row")
        place, row = lax.div(index, K * heads), lax.rem(index, K * heads)
        b, t = lax.div(place, T), lax.rem(place, T)
        k, head = lax.div(row, heads), lax.rem(row, heads)

        def load(ref):
            return plgpu.load(ref, layout=layout).astype(jnp.float32)

        def weight(ref):
            return [load(ref.at[i]) for i in (0, 1)]

        def angle():
            return load(cos_ref.at[place]), load(sin_ref.at[place])

        def normed():
            """Both halves of the row, over its root mean square."""
            parts = [[load(y_ref.at[p, place, row, i]) for p in range(pieces)] for i in (0, 1)]
            low, high = (add_up(x).astype(BF16).astype(jnp.float32) for x in parts)
            scale = lax.rsqrt(jnp.sum(low * low + high * high) / H + eps)
            return low * scale, high * scale

        def times(halves, w):
            return [x * y for x, y in zip(halves, w, strict=True)]

        def turned(halves, angle):
            (low, high), (cos, sin) = halves, angle
            return low * cos - high * sin, high * cos + low * sin

        def write(ref, at, halves):
            for i, x in enumerate(halves):
                ref[(*at, pl.ds(i * half, half))] = x.astype(BF16)

        def write_turning(ref, at, halves):
            for i, x in enumerate(halves):
                store_first(x.astype(BF16), ref.at[(*at, pl.ds(i * pairs, pairs))])

        # In each of these all loads come first, so that they are under way together.
        def query():
            at = (b, k, t * G + head)
            w, turn = weight(norm_refs[0]), angle()
            fold = weight(norm_refs[1]) if compact else None
            q = times(normed(), w)
            if not compact:
                write(q_refs[0], at, turned(q, turn))
                return
            width = plgpu.broadcasted_iota(jnp.int32, (half,), 0, layout=layout)
            write(q_refs[0], at, [jnp.where(width < pairs, 0, x) for x in times(q, fold)])
            write_turning(q_refs[1], at, turned(q, turn))

        def store(to, name, halves):
            """Writes to the slot, if there is one; zeros for padding."""
            slot, real = to
            halves = [jnp.where(jnp.full((half,), real), x, 0) for x in halves]
            some = write_turning if name == "k_rotated" else write

            @pl.when(slot < caches[name].shape[2])
            def _():
                some(cache_refs[name], (b, k, slot), halves)

        def destination():
            position = length_ref[b] + t
            slot = lax.rem(position, caches["v"].shape[2]) if ring else position
            return slot, t < new_ref[b]

        def key():
            w, turn, to = weight(norm_refs[-1]), angle(), destination()
            unit = normed()
            store(to, "k_rotated" if compact else "k", turned(times(unit, w), turn))
            if compact:
                store(to, "v", unit)

        def value():
            to = destination()
            store(to, "v", normed())

        pl.when(head < G)(query)
        if caches:
            pl.when(head == G)(key)
        if caches and not compact:
            pl.when(head > G)(value)

    def padded(x, at_rest):  # the widths beyond the turning pairs turn by nothing
        x = x.reshape(B * T, pairs)
        return jnp.pad(x, ((0, 0), (0, half - pairs)), constant_values=at_rest)

    widths = (H, 2 * pairs) if compact else (H,)
    refs = jax.tree.map(jax.new_ref, caches)
    queries = plgpu.kernel(
        norm_turn_store,
        out_type=[jax.ShapeDtypeStruct((B, K, T * G, width), BF16) for width in widths],
        grid=(B * T * K * heads,),
        grid_names=("row",),
        interpret=interpret,
    )(
        y.reshape(pieces, B * T, K * heads, 2, half),
        [w.reshape(2, half) for w in norms],
        padded(cos, 1),
        padded(sin, 0),
        length,
        new,
        refs,
    )
    return queries, jax.tree.map(jax.freeze, refs)


def _store_first(layout: Any, count: int) -> Any:
    """store_first(x of `layout`, ref [count] in global memory): the first numbers of x alone."""

    @plgpu.inline_mgpu(arg_types=(layout, plgpu.RefType()))
    def store_first(ctx, x, out):
        start = mgpu.utils.memref_ptr(out)

        @x.foreach
        def _(value, index):
            (width,) = as_int32(index)
            with where_below(width, count):
                store(value, start, width)

    return store_first


def _store_first_simulated(x, ref):
    ref[...] = x[: ref.shape[0]]
