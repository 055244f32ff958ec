"""States of sequences on the device, as rows that join and leave a batch.

Every leaf of a state (`DecodeState`, `SpeculativeState`, a drafter's) has the batch as its first
axis, so one function moves a sequence whatever the model or drafter. A batch has 1, 2, 4, … rows,
and what a step costs follows the sequences that are there, not those that might be.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from carat_jax import generate
from carat_jax.config import GemmaConfig
from carat_jax.generate import NO_TOKEN, Controls, DecodeState, Tokens
from carat_jax.kv_state import KVState
from carat_jax.model import Params
from carat_jax.options import MAX_TOP_LOGPROBS
from carat_jax.speculative import Counts, Speculation, SpeculativeState, speculate

State = DecodeState | SpeculativeState

LOGPROBS = (0, 8, 32, MAX_TOP_LOGPROBS)  # few sizes, few compilations


class Rows:
    """A batch whose rows come and go.

    Attributes:
      occupants: what the caller put into each row, None where a row is free.
    """

    def __init__(
        self, params: Params, config: GemmaConfig, most: int, speculation: Speculation | None
    ) -> None:
        """`most`: sequences at once."""
        self.occupants: list[Any] = []
        self._wants: list[Wants | None] = []
        self._params = params
        self._config = config
        self._most = most
        self._speculation = speculation
        self._state: State | None = None

    @property
    def live(self) -> list[Any]:
        """The occupants."""
        return [occupant for occupant in self.occupants if occupant is not None]

    @property
    def needed(self) -> int:
        """How many rows there will be when one more sequence has come."""
        count = len(self.occupants)
        return count if None in self.occupants else min(max(2 * count, 1), self._most)

    def insert(self, occupant: Any, state: State) -> None:
        """Puts a sequence into a free row.

        Args:
          occupant: for `occupants`.
          state: of the one sequence; donated.
        """
        wants = Wants.of(state)
        state = NOTHING.on(state)
        if self._state is None:
            self._state, self.occupants, self._wants = state, [occupant], [wants]
            return
        if None not in self.occupants:
            self._resize(self.needed)
        row = self.occupants.index(None)
        state, self._state = _places_like(state, self._state), _places_like(self._state, state)
        self._state = _insert(self._state, state, np.int32(row))
        self.occupants[row], self._wants[row] = occupant, wants

    def remove(self, occupant: Any, *, keep: bool) -> KVState | None:
        """Frees the row of an occupant; returns what the model has read if that is to be kept."""
        row = self.occupants.index(occupant)
        self.occupants[row] = self._wants[row] = None
        kept = _take(decode_part(self._state).kv, np.array([row])) if keep else None
        if not self.live:
            self.clear()
        return kept

    def shrink(self) -> None:
        """Gives up rows if half of them would do."""
        wanted = 1
        while wanted < len(self.live):
            wanted *= 2
        wanted = min(wanted, self._most)
        if self._state is not None and wanted < len(self.occupants):
            self._resize(wanted)

    def clear(self) -> None:
        """Frees all rows, and their memory."""
        free(self._state)
        self._state, self.occupants, self._wants = None, [], []

    def step(self, steps: int) -> tuple[Tokens, Counts | None]:
        """Has the device make up to `steps` more tokens for every row, or as many rounds as bring
        that at best; does not wait for it.

        Args:
          steps: at most `generate.DECODE_STEPS`.

        Returns:
          what it will have made; rows as in `occupants`. Counts with a drafter only.
        """
        spec, size = self._speculation, generate.DECODE_STEPS
        ends = np.array([occupant is None for occupant in self.occupants])
        state = Wants.all(self._wants, self._config.vocab_size).on(self._state)
        if spec is None:
            tokens, state = generate.decode(
                self._params, self._config, state, np.int32(steps), ends, size=size
            )
            counts = None
        else:
            K = spec.num_proposals
            tokens, counts, state = speculate(
                self._params,
                self._config,
                spec.drafter,
                spec.rule,
                state,
                np.int32(-(-steps // (K + 1))),
                ends,
                num_proposals=K,
                size=-(-size // (K + 1)) * (K + 1),
            )
        self._state = NOTHING.on(state)
        return tokens, counts

    def _resize(self, rows: int) -> None:
        kept = [i for i, occupant in enumerate(self.occupants) if occupant is not None]
        index = np.array(kept + [0] * (rows - len(kept)))
        leaves, structure = jax.tree.flatten(self._state)
        # One after another, so that no more than one of them is there twice.
        for i, leaf in enumerate(leaves):
            leaves[i] = _take(leaf, index)
            leaf.delete()
        self._state = jax.tree.unflatten(structure, leaves)
        free_rows = [None] * (rows - len(kept))
        self.occupants = [self.occupants[i] for i in kept] + free_rows
        self._wants = [self._wants[i] for i in kept] + free_rows


@dataclasses.dataclass(frozen=True)
class Wants:
    """What of a step is compiled for one sequence, and left out where no row needs it.

    Attributes:
      greedy, num_logprobs: see `Sampling` and `Controls`.
    """

    greedy: bool
    num_logprobs: int | None

    @classmethod
    def of(cls, state: State) -> "Wants":
        """Of a sequence's state."""
        controls = decode_part(state).controls
        return cls(controls.sampling.greedy, controls.num_logprobs)

    @classmethod
    def all(cls, wants: Sequence["Wants | None"], vocab_size: int) -> "Wants":
        """What serves every row; None = a free one."""
        live = [w for w in wants if w is not None]
        most = max((w.num_logprobs for w in live if w.num_logprobs is not None), default=None)
        if most is not None:
            most = min(next(size for size in LOGPROBS if size >= most), vocab_size)
        return cls(all(w.greedy for w in live), most)

    def on(self, state: State) -> State:
        """The state with this compiled into its steps."""
        controls = decode_part(state).controls
        sampling = controls.sampling.replace(greedy=self.greedy)
        return _with(state, controls.replace(sampling=sampling, num_logprobs=self.num_logprobs))


NOTHING = Wants(greedy=True, num_logprobs=None)


def decode_part(state: State) -> DecodeState:
    """What a state has in common with and without a drafter."""
    return state.decode if isinstance(state, SpeculativeState) else state


def free(tree: Any) -> None:
    """Frees the memory of a state's arrays now, whoever still refers to them."""
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array) and not leaf.is_deleted():
            leaf.delete()


@functools.partial(jax.jit, donate_argnums=0)
def _insert(state: State, one: State, row: jax.Array) -> State:
    def put(rows: jax.Array, new: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice_in_dim(rows, new, row, axis=0)

    return jax.tree.map(put, state, one)


@jax.jit
def _take(state: Any, index: jax.Array) -> Any:
    return jax.tree.map(lambda x: x[index], state)


def _with(state: State, controls: Controls) -> State:
    decode = decode_part(state).replace(controls=controls)
    return state.replace(decode=decode) if isinstance(state, SpeculativeState) else decode


def _places_like(state: State, other: State) -> State:
    """The state with at least as many places for ids as the other has."""
    mine, its = decode_part(state).controls, decode_part(other).controls

    def widened(ids: jax.Array, width: int) -> jax.Array:
        missing = max(width - ids.shape[1], 0)
        return jnp.pad(ids, ((0, 0), (0, missing)), constant_values=NO_TOKEN) if missing else ids

    stop_ids = widened(mine.stop_ids, its.stop_ids.shape[1])
    suppressed = widened(mine.suppressed, its.suppressed.shape[1])
    return _with(state, mine.replace(stop_ids=stop_ids, suppressed=suppressed))
