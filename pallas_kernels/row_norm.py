"""What the warpgroups of a block do to one row: norm, residual sum, and perhaps another norm."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax._src.lib.mlir.dialects import llvm  # no public name yet
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir

from pallas_kernels.dispatch import Unsupported
from pallas_kernels.partial_sums import PartialSums, add_up

WIDEST = 8192
MOST_PARTS = 8  # warpgroups of a row
WARPS = 4  # of a warpgroup


def check_rows(**arrays: jax.Array | PartialSums | None) -> None:
    """Raises Unsupported: another dtype than bfloat16, D no multiple of 256 or above 8,192, no
    rows.

    Args:
      arrays: by the names that a message gives them; the first that is not None has the rows,
        [..., D].
    """
    given = {name: x for name, x in arrays.items() if x is not None}
    for name, x in given.items():
        if x.dtype != jnp.bfloat16:
            raise Unsupported(f"{name} is {x.dtype}, this takes bfloat16")
    name, rows = next(iter(given.items()))
    D = rows.shape[-1]
    if D % 256 or D > WIDEST:
        raise Unsupported(f"{name} {rows.shape}: takes D % 256 == 0 <= {WIDEST}")
    if not rows.size:
        raise Unsupported(f"{name} {rows.shape} has no rows")


@dataclasses.dataclass(frozen=True)
class Row:
    """A row dealt out in equal runs among the warpgroups of a block, the grid's axis "part".

    The order of every sum depends on D alone: each kernel that norms by this has the same bits.

    Attributes:
      D: its width.
      eps: added to the mean square.
      interpreted: on a CPU.
      sides: rows that the block has at once, 1 or 2: of so many times `parts` warpgroups the first
        `parts` have one, the others the other.
    """

    D: int
    eps: float
    interpreted: bool
    sides: int = 1

    @property
    def parts(self) -> int:
        return max(p for p in range(1, MOST_PARTS + 1) if self.D % (256 * p) == 0)

    @property
    def width(self) -> int:
        """Of a part."""
        return self.D // self.parts

    @property
    def layout(self) -> plgpu.Layout:
        vector = next(v for v in (8, 4, 2) if self.width % (128 * v) == 0)
        return plgpu.Layout.WG_STRIDED((self.width,), vec_size=vector)

    @property
    def part(self) -> Any:
        """The part of its row that the warpgroup that asks has."""
        part = lax.axis_index("part")
        return part if self.sides == 1 else lax.rem(part, self.parts)

    @property
    def own(self) -> Any:
        """The widths of the warpgroup that asks."""
        return pl.ds(self.part * self.width, self.width)

    def scratch(self) -> dict[str, Any]:
        """Types of what `add`, `add_and_norm` and `norm` take as keywords."""
        return {
            "sums": plgpu.SMEM((2, self.parts), jnp.float32),
            "warp_sums": plgpu.SMEM((self.sides * self.parts, WARPS), jnp.float32),
            "meet": plgpu.Barrier(num_barriers=2, num_arrivals=self.parts),
        }

    def add(
        self, row: Any, h_ref: Any, y_ref: Any, w_ref: Any, which: Any = 0, **scratch: Any
    ) -> jax.Array:
        """A warpgroup's own widths of the new residual, rounded, float32 in `layout`.

        Args:
          row: which one of h [M, D] and y [pieces, M, D].
          h_ref, w_ref: None where the residual begins with y.
          which: 0 or 1, where the warpgroups meet. Not twice in succession in the same place: a
            slow one would read what a fast one has written since.
        """
        y = rounded(add_up(self.load(y_ref.at[i, row, self.own]) for i in range(y_ref.shape[0])))
        if h_ref is None:
            return y
        h, w = self.load(h_ref.at[row, self.own]), self.load(w_ref.at[self.own])
        return rounded(h + rounded(self.norm(y, w, which, **scratch)))

    def add_and_norm(
        self,
        row: Any,
        h_ref: Any,
        y_ref: Any,
        w_ref: Any,
        next_ref: Any,
        scale_refs: list[Any],
        **scratch: Any,
    ) -> tuple[jax.Array, jax.Array]:
        """A warpgroup's own widths of the new residual and of its norm, bfloat16 in `layout`.

        Args:
          row: which one of h [M, D] and y [pieces, M, D].
          h_ref, w_ref: as in `add`.
        """
        # On their way from the start.
        next_w = self.load(next_ref.at[self.own])
        scales = [ref[0].astype(jnp.float32) for ref in scale_refs]
        h = self.add(row, h_ref, y_ref, w_ref, **scratch)
        for scale in scales:
            h = rounded(h * scale)
        return h.astype(jnp.bfloat16), self.norm(h, next_w, 1, **scratch).astype(jnp.bfloat16)

    def load(self, ref: Any) -> jax.Array:
        """What a warpgroup has of a row, float32 in `layout`."""
        return plgpu.load(ref, layout=self.layout).astype(jnp.float32)

    def norm(
        self, x: jax.Array, w: jax.Array, which: Any, *, sums: Any, warp_sums: Any, meet: Any
    ) -> jax.Array:
        """norm(x, w), float32 and not rounded, of a warpgroup's own widths in `layout`.

        Args:
          which: as in `add`; of two sides each has a place to itself.
        """
        sum_squares = _sum_squares_interpreted if self.interpreted else _sum_squares(self.layout)
        total = sum_squares(x, warp_sums.at[lax.axis_index("part")])
        if self.parts > 1:  # every warpgroup adds up the sums of all, in the same order
            sums[which, self.part] = total
            plgpu.barrier_arrive(meet.at[which])
            plgpu.barrier_wait(meet.at[which])
            total = sum(sums[which, i] for i in range(self.parts))
        return x * lax.rsqrt(total / self.D + self.eps) * w


def rounded(x: jax.Array) -> jax.Array:
    """To bfloat16, and float32 again."""
    return x.astype(jnp.bfloat16).astype(jnp.float32)


def _sum_squares_interpreted(x: jax.Array, scratch: Any) -> jax.Array:
    return jnp.sum(x * x)


def _sum_squares(layout: plgpu.Layout) -> Any:
    """sum_squares(x of `layout`, scratch [WARPS] of shared memory) -> scalar.

    `jnp.sum` gives all warpgroups of a block the same scratch memory, and no warning: one reads
    what another has written. And of two products that are added, ptxas rounds either one, unless
    both say that they are rounded: then a kernel's bits are not those of another.
    """
    scalar = plgpu.ShapeDtypeStruct((), jnp.float32, layout=plgpu.Layout.WG_SPLAT(()))

    @plgpu.inline_mgpu(arg_types=(layout, plgpu.RefType()), return_type=scalar)
    def sum_squares(ctx, x, scratch):
        return x.foreach(_rounded_square, create_array=True).reduce("add", 0, scratch)

    return sum_squares


def _rounded_square(x: ir.Value, index: Any) -> ir.Value:
    return llvm.inline_asm(x.type, [x], "mul.rn.f32 $0, $1, $1;", "=f,f")
