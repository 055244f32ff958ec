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
      written: positions of its rings that were ever written; those beyond `ids` were forgotten, but
        have taken the places of older ones.
      pinned: stays until it is given up, and is copied for use.
    """

    ids: np.ndarray
    kv: KVState
    written: int
    pinned: bool = False


class Pasts:
    """Pasts that are kept, those used longest ago first.

    A past serves a prompt up to where they part. What came after is forgotten by lowering
    `length`, as far back as the rings still hold the window before that point: `reach`.
    """

    def __init__(self, config: GemmaConfig) -> None:
        self._config = config
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
        """Frees one.

        Raises:
          ValueError: it is not kept here (any more).
        """
        if past not in self._kept:
            raise ValueError("not a snapshot of this engine, or one that was released already")
        self._kept.remove(past)
        free(past.kv)

    def clear(self) -> None:
        """Frees all."""
        for past in list(self._kept):
            self.drop(past)

    def take(self, prompt: Sequence[int]) -> Past | None:
        """What has read most of a prompt, cut to what they have in common; the caller's own.

        At least the last token is left to be read. The whole is gone from here then, unless it is
        pinned, or most of it is of no use for this prompt: it may be for another.
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
        if best.pinned or 2 * shared < len(best.ids):
            self._kept.append(best)
            kv = jax.tree.map(jnp.copy, kv)
        kv = kv.replace(length=jnp.full_like(kv.length, shared))
        return Past(best.ids[:shared], kv, best.written)

    def reach(self, past: Past) -> int:
        """How many of its newest tokens a past can forget."""
        count, written = len(past.ids), past.written
        rings = [kv.v.shape[2] for kv in past.kv.layers if isinstance(kv, RingKV)]
        if written <= min(rings, default=written):
            return count  # nothing has been overwritten yet
        return max(max_decode_tokens(past.kv, self._config) - (written - count), 0)


def _common(a: np.ndarray, b: np.ndarray) -> int:
    n = min(len(a), len(b))
    differ = np.nonzero(a[:n] != b[:n])[0]
    return int(differ[0]) if differ.size else n
