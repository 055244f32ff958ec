"""A block's share of a matrix, streamed through a ring in shared memory past rows that lie there.

The columns lie on wgmma's 64-wide side and the rows on its narrow one (8 wide in decode), so that
few rows waste no work.

Row independence: where a block begins depends on D, F and the device alone, and wgmma adds up in
the order of D. So a row's bits are the same for any number of rows.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

from pallas_kernels.dispatch import Unsupported
from pallas_kernels.partial_sums import PartialSums
from pallas_kernels.read_once import copy_once
from pallas_kernels.row_copies import TILED
from pallas_kernels.streamed_product.geometry import COLUMNS, STEP, Cut
from pallas_kernels.thread_stores import as_int32, store, where_below

TILE_BYTES = STEP * COLUMNS * 2
LEAST_WEIGHTS = 2**21  # below, a launch is all there is to it


def check_matrix(dtype: Any, w: jax.Array, transposed: bool, interpreted: bool) -> None:
    """Raises Unsupported: another dtype than bfloat16 (of the rows, of w), D or F no multiple of
    64 or 128, a small matrix."""
    D, F = w.shape[::-1] if transposed else w.shape
    if dtype != jnp.bfloat16 or w.dtype != jnp.bfloat16:
        raise Unsupported(f"rows of {dtype}, a matrix of {w.dtype}: takes bfloat16")
    if D % STEP or F % COLUMNS:
        raise Unsupported(
            f"a matrix of D {D}, F {F}: takes D a multiple of {STEP} and F of {COLUMNS}"
        )
    if w.size < LEAST_WEIGHTS and not interpreted:
        raise Unsupported(f"a matrix {w.shape} has fewer than {LEAST_WEIGHTS} weights")


def height_of(M: int) -> int:
    """Of M rows in shared memory: filled up to what wgmma reads."""
    return -(-M // 8) * 8


@dataclasses.dataclass(frozen=True)
class Stream:
    """A product x · w, of which each block, on the grid's axis "block", computes its share.

    A kernel first calls `fill`, then `multiply`, with the same `load`: a function of i that asks
    for what the block's i-th step reads, and does so by `copy` for the matrix.

    Attributes:
      cut: of the matrix.
      M: rows.
      dtype: of the result, where it is in one piece.
      transposed: w is [F, D].
      stages: tiles of w in the ring.
      interpreted: on a CPU.
    """

    cut: Cut
    M: int
    dtype: Any
    transposed: bool
    stages: int
    interpreted: bool

    @property
    def height(self) -> int:
        """Of the rows in shared memory."""
        return height_of(self.M)

    @property
    def out_type(self) -> jax.ShapeDtypeStruct:
        """[pieces, M, F]."""
        dtype = self.dtype if self.cut.parts == 1 else jnp.float32
        return jax.ShapeDtypeStruct((self.cut.parts, self.M, self.cut.tiles * COLUMNS), dtype)

    def result(self, parts: jax.Array) -> jax.Array | PartialSums:
        """What an array of `out_type` stands for."""
        return parts[0] if self.cut.parts == 1 else PartialSums(parts, jnp.dtype(self.dtype))

    def scratch(self, copies: int) -> dict[str, Any]:
        """Types of the ring and of the barriers at which the `copies` of a step arrive."""
        tile = (COLUMNS, STEP) if self.transposed else (STEP, COLUMNS)
        return {
            "w_ring": plgpu.SMEM((self.stages, *tile), jnp.bfloat16, transforms=TILED),
            "full": plgpu.Barrier(num_barriers=self.stages, num_arrivals=copies),
        }

    def copy(self, i: Any, w_ref: Any, w_ring: Any, full: Any) -> tuple[Any, Any]:
        """Asks for the matrix tile of the block's i-th step: its slot of the ring, its step."""
        slot = lax.rem(i, jnp.int32(self.stages))
        column, step = self.cut.place(lax.axis_index("block"), i)
        widths, columns = pl.ds(step * STEP, STEP), pl.ds(column * COLUMNS, COLUMNS)
        tile = w_ref.at[columns, widths] if self.transposed else w_ref.at[widths, columns]
        copy_once(tile, w_ring.at[slot], full.at[slot], interpreted=self.interpreted)
        return slot, step

    def fill(self, load: Callable[[Any], None]) -> None:
        """Asks for the first steps, as many as the ring holds but for one."""
        for i in range(self.stages - 1):
            self._load_if_there(load, jnp.int32(i))

    def multiply(
        self,
        load: Callable[[Any], None],
        rows: Callable[[Any, Any], Any],
        out_ref: Any,
        w_ring: Any,
        full: Any,
    ) -> None:
        """Multiplies as the steps arrive, and writes the block's share of out_ref [pieces, M, F].

        Args:
          rows: of (slot of the ring, step along D), the [height, STEP] of shared memory with x.
        """
        cut, count = self.cut, self.cut.count(lax.axis_index("block"))

        def multiply(begin, end, first, total):
            def step(i, _):
                slot = lax.rem(i, jnp.int32(self.stages))
                plgpu.barrier_wait(full.at[slot])
                columns = w_ring.at[slot] if self.transposed else _transposed(w_ring.at[slot])
                plgpu.wgmma(total, columns, _transposed(rows(slot, first + i - begin)))
                plgpu.wgmma_wait(1)  # the product before has read its buffers
                self._load_if_there(load, i + self.stages - 1)
                return 0

            lax.fori_loop(begin, end, step, 0)
            return total[...]

        def tile(begin):
            column, step = cut.place(lax.axis_index("block"), begin)
            end = jnp.minimum(begin + cut.steps - step, count)
            y = pl.run_scoped(
                functools.partial(multiply, begin, end, step),
                plgpu.ACC((COLUMNS, self.height), jnp.float32),
            )
            part, parts = cut.part(lax.axis_index("block"), column)
            self._store(y, out_ref, part, column)
            for missing in range(1, cut.parts):

                @pl.when((part == 0) & (missing >= parts))
                def _(missing=missing):
                    zeros = plgpu.layout_cast(jnp.zeros_like(y), plgpu.Layout.WGMMA)
                    self._store(zeros, out_ref, missing, column)

            return end

        lax.while_loop(lambda begin: begin < count, tile, jnp.int32(0))

    def _load_if_there(self, load: Callable[[Any], None], i: Any) -> None:
        pl.when(i < self.cut.count(lax.axis_index("block")))(lambda: load(i))

    def _store(self, y: jax.Array, out_ref: Any, part: Any, column: Any) -> None:
        """Writes y [COLUMNS, height] to one tile of columns."""
        rows = out_ref.at[part, :, pl.ds(column * COLUMNS, COLUMNS)]
        y = y.astype(out_ref.dtype)
        if self.interpreted:
            rows[...] = y.T[: self.M]
        else:
            _store_transposed(y, rows)


def _transposed(ref):
    return ref.transpose((1, 0))


@plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType()))
def _store_transposed(ctx, y, out):
    """Writes y [columns, height] to out [M, columns] in global memory, without its rows from M."""
    (rows, _), (stride, _) = out.type.shape, ir.MemRefType(out.type).get_strides_and_offset()[0]
    start = mgpu.utils.memref_ptr(out)

    @y.foreach
    def _(value, index):
        column, row = as_int32(index)
        offset = arith.addi(arith.muli(row, mgpu.utils.c(stride, row.type)), column)
        with where_below(row, rows):
            store(value, start, offset)
