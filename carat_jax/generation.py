"""What a generation returns to Python."""

import dataclasses
import inspect
import reprlib
from collections.abc import Generator, Iterator
from typing import Any

import numpy as np

from carat_jax import display


@dataclasses.dataclass(frozen=True)
class Stats:
    """Times of one generation, in seconds, which a batch shares, and what speculation did.

    Attributes:
      ttft_s: from the call (of an engine's request: from its submission) to the first token.
      tpot_s: for each token after the first, on average; None where there is none.
      queue_s: of an engine's request, until a slot was given; else None.
      drafted, accepted: tokens proposed to this row, and those that stood; None without a drafter.
      per_position: for each place in a round, the share of the rounds with such a proposal in
        which it stood.
      acceptance_length: tokens a round, 1 + accepted / rounds.
      rounds: by the number of proposals, how many rounds this row took part in.
      draft_s, verify_s: of all rounds together, in drafting and in the rest of them: the model's
        pass and what follows it. None unless asked for by `profile`. Parts of one program cannot
        be timed from outside it. So what is measured is each call of some rounds (but the first
        for each number of proposals, which may compile) and, right before it, as many rounds of
        proposals alone, made once more from the same state. What is derived is `verify_s`, the
        difference, and the time of rounds that were not measured: that of those which were.
    """

    ttft_s: float
    tpot_s: float | None
    queue_s: float | None = None
    drafted: int | None = None
    accepted: int | None = None
    per_position: list[float] | None = None
    acceptance_length: float | None = None
    rounds: dict[int, int] | None = None
    draft_s: float | None = None
    verify_s: float | None = None

    def __repr__(self) -> str:
        known = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return f"Stats({', '.join(f'{k}={_short(v)}' for k, v in known.items() if v is not None)})"

    def _repr_html_(self) -> str:
        return display.page("Stats", self._table())

    def _table(self) -> display.Html:
        """The table, without a heading."""
        rate = f" ({1 / self.tpot_s:,.0f} tokens/s)" if self.tpot_s else ""
        rows: dict[str, Any] = {
            "queued": display.duration(self.queue_s),
            "to the first token": display.duration(self.ttft_s),
            "a token after it": self.tpot_s and display.duration(self.tpot_s) + rate,
        }
        if self.drafted is not None:
            rows["proposals"] = display.accepted_bar(self.accepted, self.drafted)
            for i, share in enumerate(self.per_position):
                drawn = display.bar((share, display.ACCEPTED), width=80)
                rows[f"proposal {i + 1}"] = display.Html(f"{drawn} stood in {share:.0%}")
            rows["tokens a round"] = f"{self.acceptance_length:.2f}"
            rows["drafting"] = display.duration(self.draft_s)
            rows["verifying"] = display.duration(self.verify_s)
        return display.fields(rows)


@dataclasses.dataclass(frozen=True)
class Generation:
    """One prompt's continuation.

    Attributes:
      text: without special tokens and stop string; "" without a tokenizer.
      tokens: generated ids, the stop id included.
      finish_reason: "stop" (stop id or string), "length" (max_new_tokens), or "non_finite": the
        logits after the last token held NaN or Inf (see non_finite_step).
      prompt_tokens: how many ids the prompt had, BOS included.
      logprobs: of each token, under the model's own distribution; None unless asked for.
      top_logprobs: for each token the k most likely ids and theirs; None unless asked for.
      thinking: of a chat reply: None without a thinking block.
      non_finite_step: index of the token that could not be chosen.
      stats: times.
    """

    text: str
    tokens: list[int]
    finish_reason: str
    prompt_tokens: int
    logprobs: list[float] | None
    top_logprobs: list[dict[int, float]] | None
    stats: Stats
    thinking: str | None = None
    non_finite_step: int | None = None

    def __repr__(self) -> str:
        shown = self.text if len(self.text) <= 60 else self.text[:57] + "…"
        return (
            f"Generation({shown!r}, {len(self.tokens)} tokens after {self.prompt_tokens}, "
            f"{self.finish_reason!r})"
        )

    def _repr_html_(self) -> str:
        reason = self.finish_reason
        if self.non_finite_step is not None:
            reason += f": no finite logits for token {self.non_finite_step}"
        counted = {
            "tokens": f"{len(self.tokens):,}, after a prompt of {self.prompt_tokens:,}",
            "ended by": reason,
            "log-probability": self.logprobs and f"{np.mean(self.logprobs):.2f} a token",
        }
        thought = [] if self.thinking is None else [display.text(self.thinking)]
        parts = [*thought, display.text(self.text), display.fields(counted), self.stats._table()]
        return display.page("Generation", *parts)


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of a streamed generation.

    Attributes:
      text: what can be shown now; incomplete UTF-8 and possible stop strings are held back, so it
        may be empty.
      tokens: the ids that arrived with it.
      generation: the whole, with the last piece; else None.
    """

    text: str
    tokens: list[int]
    generation: Generation | None = None


class Stream(Iterator[Piece]):
    """The pieces of one generation, as they come. As the value of a notebook's cell it prints
    itself live."""

    def __init__(self, pieces: Generator[Piece]) -> None:
        self._pieces = pieces
        self._tokens = 0

    def __repr__(self) -> str:
        state = inspect.getgeneratorstate(self._pieces)
        known = {inspect.GEN_CREATED: "not started", inspect.GEN_CLOSED: "ended"}
        return f"Stream({known.get(state, 'under way')}, {self._tokens} tokens)"

    def __next__(self) -> Piece:
        piece = next(self._pieces)
        self._tokens += len(piece.tokens)
        return piece

    def close(self) -> None:
        """Ends the generation and frees its state."""
        self._pieces.close()

    def _ipython_display_(self) -> None:
        for piece in self:
            print(piece.text, end="", flush=True)
        print()


class SpeculationTally:
    """Adds up what speculation did, call by call, into fields of `Stats`."""

    def __init__(self, batch: int) -> None:
        self._drafted = np.zeros(batch, int)
        self._accepted = np.zeros(batch, int)
        self._of: dict[int, _Rounds] = {}  # by K

    def add(self, counts: Any, seconds: float | None, draft_s: float | None) -> None:
        """Adds a call.

        Args:
          counts: `speculative.Counts` as NumPy arrays.
          seconds: what the call took; None where it was not timed.
          draft_s: what the proposals of as many rounds took alone; None where not timed.
        """
        B, K = counts.per_position.shape
        self._drafted += counts.drafted
        self._accepted += counts.accepted
        rounds = self._of.setdefault(K, _Rounds(np.zeros(B, int), np.zeros((B, K), int)))
        rounds.of_row += counts.rounds
        rounds.stood += counts.per_position
        rounds.passes += int(counts.rounds.max())
        if seconds is not None and draft_s is not None:
            rounds.timed += int(counts.rounds.max())
            rounds.seconds += seconds
            rounds.draft_s += draft_s

    def stats(self, row: int) -> dict[str, Any]:
        """The fields of `Stats` that a drafter fills in."""
        rounds = {K: int(r.of_row[row]) for K, r in sorted(self._of.items())}
        most = max(rounds, default=0)
        per_position = []
        for i in range(most):
            offered = sum(n for K, n in rounds.items() if K > i)
            stood = sum(int(r.stood[row, i]) for K, r in self._of.items() if K > i)
            per_position.append(stood / max(offered, 1))
        accepted = int(self._accepted[row])
        draft_s, verify_s = self._times()
        return {
            "drafted": int(self._drafted[row]),
            "accepted": accepted,
            "per_position": per_position,
            "acceptance_length": 1 + accepted / max(sum(rounds.values()), 1),
            "rounds": rounds,
            "draft_s": draft_s,
            "verify_s": verify_s,
        }

    def _times(self) -> tuple[float | None, float | None]:
        if not all(r.timed for r in self._of.values()):
            return None, None
        draft_s = verify_s = 0.0
        for r in self._of.values():
            draft_s += r.draft_s * r.passes / r.timed
            verify_s += max(r.seconds - r.draft_s, 0.0) * r.passes / r.timed
        return draft_s, verify_s


@dataclasses.dataclass
class _Rounds:
    """Those with one K: of each row, where proposals stood, and of the batch with their times."""

    of_row: np.ndarray  # [B]
    stood: np.ndarray  # [B, K]
    passes: int = 0
    timed: int = 0
    seconds: float = 0.0
    draft_s: float = 0.0


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else reprlib.repr(value)
