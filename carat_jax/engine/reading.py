"""Prompts on their way into the model, a chunk at a time."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from carat_jax import generate, sharding
from carat_jax.config import GemmaConfig
from carat_jax.engine.prefix import Past
from carat_jax.engine.rows import State
from carat_jax.kv_state import KVState, init_state
from carat_jax.model import Params
from carat_jax.options import GenerateOptions
from carat_jax.speculative import Speculation, read_prompt, start


@dataclasses.dataclass
class Reading:
    """A prompt being read.

    Attributes:
      owner: whoever it is for.
      ids: the prompt.
      end: how far it is read.
      count: tokens of it that `kv` holds.
      written: see `Past`.
      kv, hidden: state of the sequence, and what `prefill_chunk` returned last.
      drafting: the drafter's state, None where none is wanted.
      drafted: tokens of the prompt that it holds.
      reused: tokens of it that need not be read.
    """

    owner: Any
    ids: list[int]
    end: int
    count: int
    written: int
    kv: KVState
    hidden: jax.Array
    drafting: Any
    drafted: int = 0
    reused: int = 0

    @property
    def finite(self) -> bool:
        """Whether `kv` is, for the newest token has looked at all of it; waits for the device."""
        return bool(sharding.fetch(jnp.isfinite(self.hidden).all()))


def chunk_sizes(prefill_chunk: int) -> tuple[int, ...]:
    """The sizes of a piece of a prompt, ascending up to the largest."""
    return (*(c for c in generate.PREFILL_CHUNKS if c < prefill_chunk), prefill_chunk)


class Reader:
    """Reads prompts, and has the drafter read them."""

    def __init__(
        self,
        params: Params,
        config: GemmaConfig,
        max_context: int,
        chunks: tuple[int, ...],
        speculation: Speculation | None,
    ) -> None:
        """`chunks`: of `chunk_sizes`."""
        self._params = params
        self._mesh = sharding.mesh_of(params)
        self._config = config
        self._max_context = max_context
        self._chunks = chunks
        self._speculation = speculation

    def open(
        self, owner: Any, ids: list[int], end: int, past: Past | None, *, drafted: bool
    ) -> Reading:
        """Takes up a prompt.

        Args:
          owner, ids, end: of the `Reading`.
          past: what has read a beginning of it, the caller's own.
          drafted: whether a drafter, if there is one, is to read it too.
        """
        if past is None:
            kv = init_state(self._config, 1, self._max_context, mesh=self._mesh)
            past = Past(np.zeros(0, int), kv, written=0)
        hidden = jnp.zeros((1, self._config.hidden_size), jnp.dtype(self._config.dtype))
        hidden = sharding.place(hidden, self._mesh)
        drafting = None
        if self._speculation is not None and drafted:
            drafting = self._speculation.drafter.init(self._config, 1, self._max_context)
            drafting = sharding.place(drafting, self._mesh)
        count = len(past.ids)
        return Reading(
            owner, ids, end, count, past.written, past.kv, hidden, drafting, reused=count
        )

    def read_on(self, reading: Reading) -> bool:
        """Reads one chunk; returns whether there are no more."""
        if reading.drafting is not None and reading.drafted < reading.count:
            # What a past has spared the model: drafters cannot go back, and are small.
            self._draft(reading, *self._piece(reading.ids[reading.drafted : reading.count]))
        elif reading.count < reading.end:
            tokens, new = self._piece(reading.ids[reading.count : reading.end])
            reading.hidden, reading.kv = generate.prefill_chunk(
                self._params, self._config, tokens, reading.kv, new, reading.hidden
            )
            reading.count += int(new[0])
            reading.written = max(reading.written, reading.count)
            if reading.drafting is not None:
                self._draft(reading, tokens, new)
        return reading.count == reading.end

    def finish(
        self, reading: Reading, options: GenerateOptions
    ) -> tuple[generate.Tokens, generate.DecodeState]:
        """The token that follows a prompt that has been read, and the state then."""
        controls = generate.Controls.of(options, generate.row_keys(options.seed, 1))
        return generate.begin(self._params, self._config, reading.hidden, reading.kv, controls)

    def with_drafter(self, reading: Reading, state: generate.DecodeState) -> State:
        """The state of `finish`, which is donated, beside the drafter's if there is one."""
        if self._speculation is None:
            return state
        return start(self._speculation.drafter, reading.drafting, reading.hidden, state)

    def _draft(self, reading: Reading, tokens: np.ndarray, new: np.ndarray) -> None:
        drafter = self._speculation.drafter
        reading.drafting = read_prompt(drafter, reading.drafting, tokens, new)
        reading.drafted += int(new[0])

    def _piece(self, ids: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """The first chunk of these: tokens [1, size], and how many of them are real [1]."""
        size = generate.chunk_size(len(ids), 1, self._chunks)
        return next(generate.prefill_pieces([ids[:size]], (size,)))
