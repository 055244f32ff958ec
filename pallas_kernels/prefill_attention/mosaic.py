"""prefill_attention as one Mosaic GPU kernel for Hopper.

A block takes 64 positions and walks the key tiles in their sight, 64 keys each. One warpgroup
copies; two consume, each with 64 x 256 accumulators in registers (128 of a thread's 240):

  H 256  a narrow block: two query heads of a group, one for each consumer, which keeps P in
         registers. The products P·V of a tile run while the softmax of the next is computed.
  H 512  a wide block: one query head, half its output widths for each consumer. The consumers
         score every other tile and hand P over in shared memory. Two blocks of a group load their
         tiles together, half each, into the shared memory of both.

A tile costs a block 8.4 MFLOP, 2,048 cycles of the matrix units at their peak, whatever H. Its
softmax takes a consumer some 500 cycles: hidden in a narrow block, in a wide one not, as scores of
tile i + 1 need the memory of tile i - 1. Shared memory: queries 64 KB and

            tile                    ring            bytes a tile from L2
  narrow    keys 32, values 32 KB   2 + 2: 128 KB   64 KB
  wide      keys 64, values 64 KB   1 + 1: 128 KB   128 KB, 64 with a partner
  compact   turned 16, values 64    1 + 2: 144 KB   80 KB, 40 with a partner

Heads of 31B on an H200, a chunk of 2,048 after 6,144 positions; TFLOP/s of the visible pairs:

            predicted             measured
  narrow    135 µs, 510 TFLOP/s   149 µs, 461   window of 1,024: 17 tiles a block, 6 % masked
  wide      2.3 ms, 420           1.84 ms, 524
  compact   2.1 ms, 460           1.73 ms, 557

Wide blocks beat the prediction, which took L2 to end at 5.5 TB/s: without partners they are 1 to
2 % slower, and the plain form then reads 8.1. In narrow blocks a third stage of keys costs 4 %;
with it, consumers that take turns at the matrix units another 10 %, a softmax that nothing
overlaps another 4 %.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dispatch import Unsupported, require_hopper
from pallas_kernels.prefill_attention import consumers, rings
from pallas_kernels.prefill_attention.geometry import (
    CONSUMERS,
    KEYS,
    LOADER,
    PAIR,
    PIECE,
    POSITIONS,
    Form,
    Scratch,
    place,
)

REGISTERS = {"consumers": 240, "loader": 24}  # 128 · (2·240 + 24) < 65,536


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
    form = Form(
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
def _launch(form: Form, interpret: Any, length: jax.Array, *operands: jax.Array) -> jax.Array:
    q = operands[0]
    B, T, N, _ = q.shape
    return plgpu.kernel(
        functools.partial(_body, form),
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        scratch_types=form.scratch(),
        # Heads of a group run side by side and find their keys in L2.
        grid=(B, T // POSITIONS, N // form.heads // form.cluster),
        grid_names=("sequence", "position", "heads"),
        cluster=(form.cluster,) if form.cluster > 1 else (),
        cluster_names=(PAIR,) if form.cluster > 1 else (),
        num_threads=CONSUMERS + 1,
        thread_name="role",
        # Reductions along a row stay within a warp: they need no shared memory.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        interpret=interpret,
    )(length, *operands)


def _body(form: Form, length_ref: Any, *refs: Any, **scratch: Any) -> None:
    if form.compact:
        q_ref, turned_ref, keys_ref, values_ref, out_ref = refs
    else:
        q_ref, keys_ref, values_ref, out_ref = refs
        turned_ref = None
    block = rings.Block(form, place(form, length_ref), Scratch(**scratch))
    role = lax.axis_index("role")

    @pl.when(role < CONSUMERS)
    def _():
        plgpu.set_max_registers(REGISTERS["consumers"], action="increase")
        attend = consumers.attend_wide if form.wide else consumers.attend_narrow
        attend(block, role, out_ref)

    @pl.when(role == LOADER)
    def _():
        plgpu.set_max_registers(REGISTERS["loader"], action="decrease")
        rings.load(block, q_ref, turned_ref, keys_ref, values_ref)


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
