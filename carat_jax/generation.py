"""What a generation returns to Python."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Stats:
    """Times of one generation, in seconds, which a batch shares, and what speculation did.

    Attributes:
      ttft_s: from the call to the first token.
      tpot_s: for each token after the first, on average; None where there is none.
      drafted, accepted: tokens proposed to this row, and those that stood; None without a drafter.
      per_position: for each place in a round, the share of rounds in which that proposal stood.
      acceptance_length: tokens a round, 1 + accepted / rounds.
    """

    ttft_s: float
    tpot_s: float | None
    drafted: int | None = None
    accepted: int | None = None
    per_position: list[float] | None = None
    acceptance_length: float | None = None


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
