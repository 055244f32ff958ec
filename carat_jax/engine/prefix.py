"""States of past sequences, from which a prompt that begins alike can go on."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from carat_jax.config import GemmaConfig
from carat_jax.engine.rows import free
from carat_jax.kv_state import KVState, RingKV, max_decode_tokens


@dataclasses.dataclass(eq=False)
class Past:
    """What a model has read.

    Attributes:
      ids: the tokens, as many as `kv` holds.
      kv: the state of the one sequence.
      pinned: stays until it is given up, and is copied for use.
    """

    ids: np.ndarray
    kv: KVState
    pinned: bool = False


class Pasts:
    """Pasts that are kept, those used longest ago first.

    A past serves a prompt up to where they part. What came after is forgotten by lowering
    `length`, as far back as the rings still hold the window before that point: `reach`.
    """

    def __init__(self, config: GemmaConfig, written_ahead: int) -> None:
        """`written_ahead`: positions that a step may have written beyond the tokens that stood."""
        self._config = config
        self._written_ahead = written_ahead
        self._kept: list[Past] = []

    def __len__(self) -> int:
        """How many are kept that are not pinned."""
        return sum(not past.pinned for past in self._kept)

    def keep(self, past: Past) -> None:
        """Keeps a past."""
        self._kept.append(past)

    def drop_oldest(self) -> None:
        """Frees the one used longest ago, if there is one that is not pinned."""
        for past in self._kept:
            if not past.pinned:
                self.drop(past)
                return

    def drop(self, past: Past) -> None:
        """Frees one."""
        self._kept.remove(past)
        free(past.kv)

    def clear(self) -> None:
        """Frees all."""
        for past in list(self._kept):
            self.drop(past)

    def take(self, prompt: Sequence[int]) -> tuple[int, KVState] | None:
        """The state that has read most of a prompt, and how many of its tokens.

        At least the last token is left to be read. The past is gone from here unless it is pinned.
        """
        ids = np.asarray(prompt[:-1])
        best, shared = None, 0
        for past in self._kept:
            common = _common(past.ids, ids)
            if common > shared and len(past.ids) - common <= self.reach(past):
                best, shared = past, common
        if best is None:
            return None
        kv = best.kv
        self._kept.remove(best)
        if best.pinned:
            self._kept.append(best)
            kv = jax.tree.map(jnp.copy, kv)
        return shared, kv.replace(length=jnp.asarray([shared], jnp.int32))

    def reach(self, past: Past) -> int:
        """How many of its newest tokens a past can forget."""
        count, ahead = len(past.ids), self._written_ahead
        rings = [kv.v.shape[2] for kv in past.kv.layers if isinstance(kv, RingKV)]
        if count + ahead <= min(rings, default=count + ahead):
            return count  # nothing has been overwritten yet
        return max(max_decode_tokens(past.kv, self._config) - ahead, 0)


def _common(a: np.ndarray, b: np.ndarray) -> int:
    n = min(len(a), len(b))
    differ = np.nonzero(a[:n] != b[:n])[0]
    return int(differ[0]) if differ.size else n
