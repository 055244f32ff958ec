"""How a matrix is cut into steps, and the steps among blocks."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax

STEP = 64  # of D: a row of it is as wide as the swizzle, 128 bytes
COLUMNS = 128  # of a tile
LEAST_STEPS = 8  # of a block
IDLE = 0.05  # of the multiprocessors may stand idle, for fewer partial sums


@dataclasses.dataclass(frozen=True)
class Cut:
    """A matrix as tiles of columns, and these as steps along D.

    As many whole tiles as there are for all blocks come first: then the blocks walk down the
    same rows together, which device memory answers fastest. The steps of the tiles that are
    left are dealt out in equal runs, and a tile that falls to several blocks gets as many
    partial sums.

    Attributes:
      steps: of each tile.
      tiles: of columns.
      blocks: at most the multiprocessors.
    """

    steps: int
    tiles: int
    blocks: int

    @classmethod
    def of(cls, D: int, F: int, cores: int) -> "Cut":
        """The one with the fewest partial sums, of those that use most of the cores."""
        steps, tiles = D // STEP, F // COLUMNS
        most = max(min(cores, steps * tiles // LEAST_STEPS), 1)
        least = max(int(most * (1 - IDLE)), 1)
        cuts = [cls(steps, tiles, blocks) for blocks in range(most, least - 1, -1)]
        return min(cuts, key=lambda cut: cut.parts)

    @property
    def whole(self) -> int:
        """Whole tiles of each block: block b has tiles b, b + blocks, …"""
        return self.tiles // self.blocks

    @property
    def shared(self) -> int:
        """Steps of all the tiles that are left."""
        return self.tiles % self.blocks * self.steps

    @property
    def parts(self) -> int:
        """Partial sums of the tile that has most of them."""
        ends = range(0, self.shared, self.steps)
        return max(
            (self._holder(i + self.steps - 1) - self._holder(i) + 1 for i in ends), default=1
        )

    def count(self, block: Any) -> Any:
        """Steps of a block."""
        return self.whole * self.steps + self._begin(block + 1) - self._begin(block)

    def place(self, block: Any, i: Any) -> tuple[Any, Any]:
        """The tile, and the step of it, that a block's i-th step is."""
        alone = self.whole * self.steps
        i = jnp.where(
            i < alone,
            _quotient(i, self.steps) * self.blocks * self.steps
            + block * self.steps
            + lax.rem(i, jnp.int32(self.steps)),
            i - alone + self._begin(block) + self.whole * self.blocks * self.steps,
        )
        return _quotient(i, self.steps), lax.rem(i, jnp.int32(self.steps))

    def part(self, block: Any, tile: Any) -> tuple[Any, Any]:
        """Which partial sum of a tile a block has, and how many the tile has."""
        i = (tile - self.whole * self.blocks) * self.steps
        first, last = self._holder(i), self._holder(i + self.steps - 1)
        shared = i >= 0
        return jnp.where(shared, block - first, 0), jnp.where(shared, last - first + 1, 1)

    def _begin(self, block: Any) -> Any:
        """The first shared step of a block."""
        return _quotient(block * self.shared, self.blocks)

    def _holder(self, i: Any) -> Any:
        """The block that has a shared step."""
        return _quotient((i + 1) * self.blocks - 1, max(self.shared, 1))


def _quotient(a: Any, b: int) -> Any:
    return a // b if isinstance(a, int) else lax.div(a, jnp.int32(b))
