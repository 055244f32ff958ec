"""Stores of single numbers, to global or shared memory, by some threads only.

Mosaic GPU stores whole arrays; these are for parts of one, and for places that threads compute.
For bodies of `plgpu.inline_mgpu`.
"""

import contextlib
from collections.abc import Iterable

from jax._src.lib.mlir.dialects import llvm  # no public name yet
from jax.experimental.mosaic import gpu as mgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith


def as_int32(indices: Iterable[ir.Value]) -> list[ir.Value]:
    """The indices that `FragmentedArray.foreach` gives, for arithmetic on them."""
    return [arith.index_cast(ir.IntegerType.get_signless(32), index) for index in indices]


def where_below(index: ir.Value, end: int) -> contextlib.AbstractContextManager[None]:
    """What is built inside runs in threads whose index (int32, not negative) is below the end."""
    below = arith.cmpi(arith.CmpIPredicate.ult, index, mgpu.utils.c(end, index.type))
    return mgpu.utils.when(below)


def store(value: ir.Value, start: ir.Value, offset: ir.Value) -> None:
    """Puts a number `offset` (int32) numbers of its own type behind `start`, of `memref_ptr`."""
    llvm.store(value, mgpu.utils.getelementptr(start, [offset], value.type))
