"""prefill_attention as one Mosaic GPU kernel for Hopper, with roles for its warpgroups.

A block takes 64 positions of 512 / H query heads that share a KV head (one head of width 512, two
of width 256) and walks the key tiles in their sight, 64 keys each:

  loader     TMA copies of the queries, then of key and value tiles into rings
  scorer     scores = Q·Kᵀ, the running softmax, P in bfloat16 to shared memory
  2 summers  256 of the block's 512 columns of accumulators each: A = A·α + P·V

The scorer is one or two tiles ahead of the summers, so the softmax hides under their products. A
head of width 512 needs the registers of both summers for 64 rows, which is why they do not form
scores as well.

A tile costs 8.4 MFLOP whatever H, and 64 KB of shared memory filled (80 KB in the compact form):
128 (102) FLOP a byte, so 132 multiprocessors at 500 TFLOP/s read 3.9 (4.9) TB/s from L2, near what
it gives. That is the expected limit for H 512; for H 256 through a window of 1,024 it is the 6 %
of masked keys and the start and end of each block, a tenth of its 17 tiles.

Measured on an H200: a chunk of 2,048 through 31B's window takes 308 µs, 223 TFLOP/s, twice what
was predicted: 4.5 µs a tile whose products need 1.2. Why has not been read from counters yet.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dispatch import Unsupported, require_hopper

POSITIONS = 64  # of a block
KEYS = 64  # of a tile
SLAB = 256  # widths of a value tile that one summer takes
# Widths of one of its two accumulators. The assembler holds a single instruction to the 128
# registers that each of 512 threads starts with, and one of 256 widths needs 154.
PART = 128
PIECE = 64  # widths of one product: a row of 128 bytes, as wide as shared memory is swizzled
SUMMERS, SCORER, LOADER = 2, 2, 3  # warpgroups 0 and 1, 2, 3
P_STAGES = 2  # tiles of P that the scorer may be ahead of the summers
REGISTERS = {"summers": 160, "scorer": 168, "loader": 24}  # 128 · (2·160 + 168 + 24) = 65,536

# Masked scores must stay far below the running maximum's first value, so that exp2 of their
# difference is 0 in a tile whose keys are all masked.
MASKED_SCORE = -1e38
FIRST_TOP = -1e30
LOG2E = math.log2(math.e)

SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


def prefill_attention(
    q: jax.Array,
    k: jax.Array | None,
    v: jax.Array,
    length: jax.Array,
    *,
    window: int | None = None,
    q_rotated: jax.Array | None = None,
    k_rotated: jax.Array | None = None,
    interpret: Any = None,
) -> jax.Array:
    """See `pallas_kernels.prefill_attention.prefill_attention`.

    Args:
      interpret: `plgpu.InterpretGPUParams()` to simulate the kernel on CPU.

    Raises:
      Unsupported: no Hopper GPU; a dtype other than bfloat16; H other than 256 or 512; T or S not
        a multiple of 64; an odd number of heads of width 256 on a KV head; P other than 128.
    """
    if interpret is None:
        require_hopper()
    _check(q, v, k_rotated)
    form = _Form(
        T=q.shape[1],
        S=v.shape[2],
        G=q.shape[2] // v.shape[1],
        H=q.shape[3],
        window=window,
        compact=k is None,
        interpreted=interpret is not None,
    )
    operands = (q, q_rotated, k_rotated, v) if k is None else (q, k, v)
    return _launch(form, interpret, length.astype(jnp.int32), *operands)


# Under its own jit, so that the many layers of a model trace and lower it once.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _launch(form: "_Form", interpret: Any, length: jax.Array, *operands: jax.Array) -> jax.Array:
    q = operands[0]
    B, T, N, _ = q.shape
    return plgpu.kernel(
        functools.partial(_body, form),
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        scratch_types=form.scratch(),
        # Heads of a group run side by side and find their keys in L2.
        grid=(B, T // POSITIONS, N // form.heads),
        grid_names=("sequence", "position", "heads"),
        num_threads=4,
        thread_name="role",
        # Reductions along a row stay within a warp: they need no shared memory.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        interpret=interpret,
    )(length, *operands)


def _check(q: jax.Array, v: jax.Array, k_rotated: jax.Array | None) -> None:
    _, T, N, H = q.shape
    _, K, S, _ = v.shape
    if q.dtype != jnp.bfloat16 or v.dtype != jnp.bfloat16:
        raise Unsupported(f"q {q.dtype}, v {v.dtype}: takes bfloat16 only")
    if H not in (256, 512):
        raise Unsupported(f"head width {H}: takes 256 and 512")
    if T % POSITIONS or S % KEYS:
        raise Unsupported(f"{T} queries over {S} keys: takes multiples of 64 of both")
    if N // K % (512 // H):
        raise Unsupported(f"{N // K} query heads on a KV head of width {H}: takes an even number")
    if k_rotated is not None and k_rotated.shape[3] != 2 * PIECE:
        raise Unsupported(f"{k_rotated.shape[3]} rotated widths: takes {2 * PIECE}")


class _Form(NamedTuple):
    """What is known while tracing. Letters as in `pallas_kernels`."""

    T: int
    S: int
    G: int
    H: int
    window: int | None
    compact: bool
    interpreted: bool

    @property
    def heads(self) -> int:
        """Query heads of a block."""
        return 512 // self.H

    @property
    def slabs(self) -> int:
        """Slabs of a value tile, and of a key tile in the plain form."""
        return self.H // SLAB

    @property
    def key_slabs(self) -> int:
        return 1 if self.compact else self.slabs

    @property
    def key_stages(self) -> int:
        return 1 if self.compact or self.H == 512 else 2

    @property
    def value_stages(self) -> int:
        """Tiles of the value ring: one where key and value tiles of width 512 fill the memory."""
        return 2 if self.compact or self.H == 256 else 1

    def scratch(self) -> tuple:
        """Shared memory (at most 226 KB of a block's 227) and barriers, as `_Scratch`."""
        pieces = self.H // PIECE
        swizzled = functools.partial(plgpu.SMEM, dtype=jnp.bfloat16, transforms=SWIZZLED)
        key_width = 2 * PIECE if self.compact else SLAB
        queries = swizzled((self.heads, pieces, POSITIONS, PIECE))
        output = swizzled((SUMMERS, POSITIONS, SLAB))
        key_barriers = self.key_stages * self.key_slabs
        value_barriers = self.value_stages * self.slabs
        p_barriers = P_STAGES * self.heads
        return (
            plgpu.RefUnion(queries, output),
            swizzled((self.key_stages, self.key_slabs, KEYS, key_width)),
            swizzled((self.value_stages, self.slabs, KEYS, SLAB)),
            swizzled((P_STAGES, self.heads, POSITIONS, KEYS)),
            plgpu.SMEM((P_STAGES, self.heads, POSITIONS), jnp.float32),
            plgpu.Barrier(num_arrivals=self.heads * pieces),
            plgpu.Barrier(num_barriers=key_barriers),
            plgpu.Barrier(num_barriers=key_barriers),
            plgpu.Barrier(num_barriers=value_barriers),
            plgpu.Barrier(num_barriers=value_barriers, num_arrivals=self.heads),
            plgpu.Barrier(num_barriers=p_barriers),
            plgpu.Barrier(num_barriers=p_barriers, num_arrivals=SUMMERS // self.heads),
        )


class _Scratch(NamedTuple):
    """Shared memory and barriers of a block.

    Attributes:
      queries: [heads, H / 64, positions, 64]; output: [summers, positions, 256], its successor.
      keys: ring of [slabs, keys, 256], or of [1, keys, 128] turned widths in the compact form.
      values: ring of [slabs, keys, 256].
      p: ring of [heads, positions, keys]; scale: ring of [heads, positions], what the
        accumulators are to be multiplied by first.
      …_full, …_free: of each slab (rings) or head (p, with scale).
    """

    output_or_queries: Any
    keys: Any
    values: Any
    p: Any
    scale: Any
    queries_full: Any
    keys_full: Any
    keys_free: Any
    values_full: Any
    values_free: Any
    p_full: Any
    p_free: Any

    @property
    def queries(self) -> Any:
        return self.output_or_queries[0]

    @property
    def output(self) -> Any:
        return self.output_or_queries[1]


class _Place(NamedTuple):
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


def _place(form: _Form, length_ref: Any) -> _Place:
    b = lax.axis_index("sequence")
    head = lax.axis_index("heads") * form.heads
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
    return _Place(b, kv_head, head, position, own, oldest, first, last - first + 1)


def _body(form: _Form, length_ref: Any, *refs: Any) -> None:
    if form.compact:
        q_ref, turned_ref, keys_ref, values_ref, out_ref, *scratch = refs
    else:
        q_ref, keys_ref, values_ref, out_ref, *scratch = refs
        turned_ref = None
    scratch = _Scratch(*scratch)
    place = _place(form, length_ref)
    role = lax.axis_index("role")

    @pl.when(role < SUMMERS)
    def _():
        plgpu.set_max_registers(REGISTERS["summers"], action="increase")
        _sum(form, place, scratch, role, out_ref)

    @pl.when(role == SCORER)
    def _():
        plgpu.set_max_registers(REGISTERS["scorer"], action="increase")
        _score(form, place, scratch)

    @pl.when(role == LOADER)
    def _():
        plgpu.set_max_registers(REGISTERS["loader"], action="decrease")
        _load(form, place, scratch, q_ref, turned_ref, keys_ref, values_ref)


def _turned_piece(form: _Form, piece: int) -> int | None:
    """Which piece of the turned widths stands in for these widths of a head, if any.

    RoPE turns the first widths of each half of a head; there the compact form's q is zero.
    """
    half = form.H // PIECE // 2
    if not form.compact or piece % half:
        return None
    return piece // half


def _stage(i: jax.Array, stages: int) -> jax.Array | int:
    """Where in a ring tile i is."""
    return 0 if stages == 1 else lax.rem(i, jnp.int32(stages))


def _load(form, place, scratch, q_ref, turned_ref, keys_ref, values_ref):
    rows = pl.ds(place.position, POSITIONS)
    for head in range(form.heads):
        for piece in range(form.H // PIECE):
            turned = _turned_piece(form, piece)
            ref, column = (q_ref, piece) if turned is None else (turned_ref, turned)
            widths = pl.ds(column * PIECE, PIECE)
            plgpu.copy_gmem_to_smem(
                ref.at[place.b, rows, place.head + head, widths],
                scratch.queries.at[head, piece],
                scratch.queries_full,
            )

    def fill(i, ref, ring, stages, full, free):
        slabs, _, width = ring.shape[1:]
        stage = _stage(i, stages)
        keys = pl.ds((place.first + i) * KEYS, KEYS)
        for slab in range(slabs):
            barrier = stage * slabs + slab

            @pl.when(i >= stages)
            def _(barrier=barrier):
                plgpu.barrier_wait(free.at[barrier])

            plgpu.copy_gmem_to_smem(
                ref.at[place.b, place.kv_head, keys, pl.ds(slab * width, width)],
                ring.at[stage, slab],
                full.at[barrier],
            )

    keys = (keys_ref, scratch.keys, form.key_stages, scratch.keys_full, scratch.keys_free)
    values = (
        values_ref,
        scratch.values,
        form.value_stages,
        scratch.values_full,
        scratch.values_free,
    )

    def tile(i, _):
        # In the order in which the scorer asks for them.
        for ring in (values, keys) if form.compact else (keys, values):
            fill(i, *ring)

    lax.fori_loop(0, place.tiles, tile, None)

    for _, ring, stages, _, free in (keys, values):
        _drain(place.tiles - stages, place.tiles, stages, ring.shape[1], free)


def _drain(first, end, stages, parts, free):
    """Waits until the tiles from `first` to `end` are released: no barrier may end unobserved."""

    def tile(i, _):
        for part in range(parts):
            plgpu.barrier_wait(free.at[_stage(i, stages) * parts + part])

    lax.fori_loop(jnp.maximum(first, 0), end, tile, None)


def _score(form, place, scratch):
    pieces = form.H // PIECE
    by_row = plgpu.Layout.WGMMA.reduce(1)
    plgpu.barrier_wait(scratch.queries_full)

    def piece_of_keys(i, piece):
        """Widths of tile i that meet a piece of the queries: [keys, 64]."""
        turned = _turned_piece(form, piece)
        in_values = form.compact and turned is None
        ring = scratch.values if in_values else scratch.keys
        stage = _stage(i, form.value_stages if in_values else form.key_stages)
        column = piece if turned is None else turned
        slab, column = divmod(column * PIECE, SLAB)
        return ring.at[stage, slab, :, pl.ds(column, PIECE)]

    def wait_for_tile(i):
        rings = [(form.key_stages, form.key_slabs, scratch.keys_full)]
        if form.compact:
            rings.insert(0, (form.value_stages, form.slabs, scratch.values_full))
        for stages, slabs, full in rings:
            for slab in range(slabs):
                plgpu.barrier_wait(full.at[_stage(i, stages) * slabs + slab])

    def hand_over(i, head, scale, p=None):
        stage = _stage(i, P_STAGES)
        barrier = stage * form.heads + head

        @pl.when(i >= P_STAGES)
        def _():
            plgpu.barrier_wait(scratch.p_free.at[barrier])

        scratch.scale.at[stage, head][...] = scale
        if p is not None:
            scratch.p.at[stage, head][...] = p
        plgpu.commit_smem()
        plgpu.barrier_arrive(scratch.p_full.at[barrier])

    def softmax(i, head, scores, top, total):
        """Hands P of tile i to the summers; returns the new running maximum and sum."""
        scores = _masked(form, place, i, scores)
        new_top = jnp.maximum(top, scores.max(axis=1) * LOG2E)
        scale = jnp.exp2(top - new_top)
        p = jnp.exp2(scores * LOG2E - lax.broadcast_in_dim(new_top, scores.shape, [0]))

        hand_over(i, head, scale, p.astype(jnp.bfloat16))
        return new_top, total * scale + p.sum(axis=1)

    def tile(i, carry):
        def products(*accumulators):
            wait_for_tile(i)
            for head, accumulator in enumerate(accumulators):
                for piece in range(pieces):
                    keys = piece_of_keys(i, piece).transpose((1, 0))
                    plgpu.wgmma(accumulator, scratch.queries.at[head, piece], keys)
            results = []
            for head, accumulator in enumerate(accumulators):
                later = (form.heads - 1 - head) * pieces  # products that may still run
                scores = plgpu.wgmma_accumulator_load(accumulator, wait_n=later)
                if not later:
                    for slab in range(form.key_slabs):
                        stage = _stage(i, form.key_stages)
                        plgpu.barrier_arrive(scratch.keys_free.at[stage * form.key_slabs + slab])
                results.append(softmax(i, head, scores, *carry[head]))
            return tuple(results)

        shape = plgpu.ACC((POSITIONS, KEYS), jnp.float32)
        return pl.run_scoped(products, *[shape] * form.heads)

    start = tuple(
        plgpu.layout_cast(jnp.full((POSITIONS,), value, jnp.float32), by_row)
        for value in (FIRST_TOP, 0.0)
    )
    ends = lax.fori_loop(0, place.tiles, tile, (start,) * form.heads)
    for head, (_, total) in enumerate(ends):
        # A row that sees no key has sums of zero: it becomes zeros, not NaN.
        hand_over(place.tiles, head, 1 / jnp.maximum(total, 1e-30))
    _drain(place.tiles + 1 - P_STAGES, place.tiles, P_STAGES, form.heads, scratch.p_free)


def _masked(form, place, i, scores):
    """Scores with MASKED_SCORE where a query does not see a key of tile i."""
    key = (place.first + i) * KEYS

    def mask(scores):
        row, column = (
            plgpu.broadcasted_iota(jnp.int32, scores.shape, axis, layout=plgpu.Layout.WGMMA)
            for axis in (0, 1)
        )
        # Bounds of a row rather than row - column: those differences would be kept in 32
        # registers, for the few tiles that need them.
        own = row + (place.own - key)
        seen = column <= own
        if form.window is not None:
            seen &= column >= jnp.maximum(own - (form.window - 1), place.oldest - key)
        return jnp.where(seen, scores, MASKED_SCORE)

    border = key + (KEYS - 1) > place.own
    if form.window is not None:
        lowest = jnp.maximum(place.own + (POSITIONS - form.window), place.oldest)
        border |= key < lowest
    return lax.cond(border, mask, lambda scores: scores, scores)


def _sum(form, place, scratch, summer, out_ref):
    by_row = plgpu.Layout.WGMMA.reduce(1)
    head = summer if form.heads == SUMMERS else 0
    slab = summer if form.slabs == SUMMERS else 0

    def scaled(i, sums):
        """Waits for P of tile i; returns the sums after its scale."""
        stage = _stage(i, P_STAGES)
        plgpu.barrier_wait(scratch.p_full.at[stage * form.heads + head])
        scale = plgpu.load(scratch.scale.at[stage, head], layout=by_row)
        scale = lax.broadcast_in_dim(scale, (POSITIONS, PART), [0])
        return tuple(part * scale for part in sums)

    def tile(i, sums):
        p_stage, stage = _stage(i, P_STAGES), _stage(i, form.value_stages)
        barrier = stage * form.slabs + slab
        sums = scaled(i, sums)
        plgpu.barrier_wait(scratch.values_full.at[barrier])

        def product(accumulators):
            for part, accumulator in enumerate(accumulators):
                widths = pl.ds(part * PART, PART)
                values = scratch.values.at[stage, slab, :, widths]
                plgpu.wgmma(accumulator, scratch.p.at[p_stage, head], values)

        sums = _accumulate(sums, product, form.interpreted)
        plgpu.barrier_arrive(scratch.values_free.at[barrier])
        plgpu.barrier_arrive(scratch.p_free.at[p_stage * form.heads + head])
        return sums

    zeros = plgpu.layout_cast(jnp.zeros((POSITIONS, PART), jnp.float32), plgpu.Layout.WGMMA)
    sums = lax.fori_loop(0, place.tiles, tile, (zeros,) * (SLAB // PART))
    for part, values in enumerate(scaled(place.tiles, sums)):  # the last scale is 1 / total
        widths = pl.ds(part * PART, PART)
        scratch.output.at[summer, :, widths][...] = values.astype(jnp.bfloat16)
    plgpu.commit_smem()
    rows, widths = pl.ds(place.position, POSITIONS), pl.ds(slab * SLAB, SLAB)
    plgpu.copy_smem_to_gmem(
        scratch.output.at[summer], out_ref.at[place.b, rows, place.head + head, widths]
    )
    plgpu.wait_smem_to_gmem(0)


def _accumulate(sums, product, interpreted):
    """Runs `product` on accumulators that start as `sums`; returns what they then hold.

    The interpreter can only start an accumulator from zero.
    """
    if not interpreted:
        return pl.run_state(product)(tuple(plgpu.ACC.init(part) for part in sums))

    def from_zero(*accumulators):
        product(accumulators)
        added = (accumulator[...] for accumulator in accumulators)
        return tuple(map(jnp.add, sums, added))

    return pl.run_scoped(from_zero, *(plgpu.ACC(part.shape, jnp.float32) for part in sums))
