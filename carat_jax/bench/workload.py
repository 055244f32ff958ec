"""Workloads of a server: who asks what, when, and for how much. Made from distributions or a file.

A file has a JSON object on each line, a conversation:

    {"arrival_s": 1.5, "prompt": 512, "output_tokens": 128,
     "then": [{"think_s": 4, "prompt": 40, "output_tokens": 128}]}

`prompt` is a text, ids, or how many ids to draw. `then` are later turns, if any: each reads all
that was said before and its own prompt, so many seconds after the answer before it.
"""

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from carat_jax.tokenizer import Tokenizer

Prompt = str | tuple[int, ...] | int
FORMS = "fixed:VALUE, uniform:LOW:HIGH or lognormal:MEDIAN:SIGMA"


@dataclasses.dataclass(frozen=True)
class Turn:
    """A request.

    Attributes:
      prompt: text, ids, or how many ids to draw.
      output_tokens: to be generated, no more and no fewer.
      think_s: seconds between the answer before and this turn.
    """

    prompt: Prompt
    output_tokens: int
    think_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class Conversation:
    """Turns of which each goes on from all before it; the first comes at `arrival_s`."""

    arrival_s: float
    turns: tuple[Turn, ...]


@dataclasses.dataclass(frozen=True)
class Distribution:
    """Of lengths or times, written as `FORMS`. SIGMA is of the natural logarithm."""

    kind: str
    numbers: tuple[float, ...]

    @classmethod
    def parse(cls, text: str, least: float) -> Self:
        """Raises ValueError for another form, or numbers that lead below `least`."""
        kind, *words = text.split(":")
        wanted = {"fixed": 1, "uniform": 2, "lognormal": 2}.get(kind)
        try:
            numbers = tuple(float(word) for word in words)
        except ValueError:
            numbers = ()
        if len(numbers) != wanted or not all(map(math.isfinite, numbers)):
            raise ValueError(f"{text!r}: give {FORMS}")
        if numbers[0] < least:
            raise ValueError(f"{text!r}: {numbers[0]:g} must be at least {least:g}")
        if (kind == "uniform" and numbers[1] < numbers[0]) or numbers[-1] < 0:
            raise ValueError(f"{text!r}: {numbers[1]:g} is too small")
        return cls(kind, numbers)

    def __str__(self) -> str:
        return ":".join([self.kind, *(f"{number:g}" for number in self.numbers)])

    def draw(self, random: np.random.Generator, count: int) -> np.ndarray:
        """`count` values, float64."""
        if self.kind == "fixed":
            return np.full(count, self.numbers[0])
        if self.kind == "uniform":
            return random.uniform(*self.numbers, count)
        median, sigma = self.numbers
        return median * np.exp(sigma * random.standard_normal(count))

    def draw_counts(self, random: np.random.Generator, count: int) -> np.ndarray:
        """`count` integers from 1 on; of a uniform distribution, both ends are as likely as any."""
        if self.kind == "uniform":
            low, high = map(round, self.numbers)
            return random.integers(low, high, count, endpoint=True)
        return np.maximum(np.rint(self.draw(random, count)), 1).astype(int)


def make(
    *,
    conversations: int,
    rate: float,
    turns: Distribution,
    prompt: Distribution,
    follow_up: Distribution,
    output: Distribution,
    think: Distribution,
    seed: int,
) -> list[Conversation]:
    """Draws a workload; the same seed, the same workload.

    Args:
      conversations: how many.
      rate: of their arrivals, a second, a Poisson process from 0 on; inf: all come at once.
      turns: of a conversation.
      prompt, follow_up: tokens of the first prompt, and of what each later turn adds.
      output: tokens of an answer.
      think: seconds before a later turn.
    """
    # A stream for each, so that a change of one leaves the others as they are.
    streams = np.random.default_rng(seed).spawn(6)
    gaps = streams[0].standard_exponential(conversations) / rate
    arrivals = np.cumsum(gaps) - gaps[:1]
    made = []
    for arrival, count in zip(arrivals, turns.draw_counts(streams[1], conversations), strict=True):
        prompts = [
            *prompt.draw_counts(streams[2], 1),
            *follow_up.draw_counts(streams[3], count - 1),
        ]
        outputs = output.draw_counts(streams[4], count)
        thinks = [0.0, *think.draw(streams[5], count - 1)]
        together = zip(prompts, outputs, thinks, strict=True)
        said = tuple(Turn(int(p), int(o), round(float(t), 3)) for p, o, t in together)
        made.append(Conversation(round(float(arrival), 6), said))
    return made


def write(path: Path, workload: Sequence[Conversation]) -> None:
    """Writes a file that `read` reads."""
    lines = []
    for conversation in workload:
        first, *later = conversation.turns
        line: dict[str, Any] = {"arrival_s": conversation.arrival_s} | _asked(first)
        if later:
            line["then"] = [{"think_s": turn.think_s} | _asked(turn) for turn in later]
        lines.append(json.dumps(line) + "\n")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(lines), encoding="utf-8")


def read(path: Path) -> list[Conversation]:
    """Reads a file; blank lines are skipped.

    Raises:
      OSError: no such file.
      ValueError: a line that is no conversation, by its number, or no line at all.
    """
    workload = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            try:
                workload.append(_conversation(json.loads(line)))
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}, line {number}: {error}") from None
    if not workload:
        raise ValueError(f"{path} has no request")
    return workload


def as_ids(
    workload: Sequence[Conversation], vocab_size: int, tokenizer: Tokenizer | None, seed: int
) -> list[list[list[int]]]:
    """The ids that each turn adds, by conversation and turn.

    Args:
      vocab_size: ids are below it.
      tokenizer: for prompts that are texts.
      seed: of the ids that are drawn.

    Raises:
      ValueError: an id beyond the vocabulary, or a text without a tokenizer.
    """

    def ids(turn: Turn, place: tuple[int, int]) -> list[int]:
        if isinstance(turn.prompt, int):
            random = np.random.default_rng((seed, *place))
            return random.integers(0, vocab_size, turn.prompt).tolist()
        if isinstance(turn.prompt, str):
            if tokenizer is None:
                raise ValueError(
                    f"no tokenizer for the prompt {turn.prompt!r}: give ids, or how many"
                )
            return tokenizer.encode(turn.prompt, add_bos=place[1] == 0)
        if max(turn.prompt) >= vocab_size:
            raise ValueError(f"prompt id {max(turn.prompt)}: ids go from 0 to {vocab_size - 1}")
        return list(turn.prompt)

    return [
        [ids(turn, (i, j)) for j, turn in enumerate(conversation.turns)]
        for i, conversation in enumerate(workload)
    ]


def lengths(
    workload: Sequence[Conversation], ids: Sequence[Sequence[Sequence[int]]]
) -> list[tuple[int, int]]:
    """Tokens of each turn's prompt, with all that was said before, and of its answer."""
    found = []
    for conversation, added in zip(workload, ids, strict=True):
        said = 0
        for turn, new in zip(conversation.turns, added, strict=True):
            found.append((said + len(new), turn.output_tokens))
            said += len(new) + turn.output_tokens
    return found


def _asked(turn: Turn) -> dict[str, Any]:
    return {"prompt": turn.prompt, "output_tokens": turn.output_tokens}


def _conversation(line: Any) -> Conversation:
    first = _fields(line, {"arrival_s", "prompt", "output_tokens"}, {"then"})
    then = first.get("then", [])
    if not isinstance(then, list):
        raise ValueError(f"then = {then!r}: it must be a list of turns")
    turns = [_turn(first, 0.0)]
    for later in then:
        fields = _fields(later, {"think_s", "prompt", "output_tokens"}, set())
        turns.append(_turn(fields, _seconds("think_s", fields["think_s"])))
    return Conversation(_seconds("arrival_s", first["arrival_s"]), tuple(turns))


def _fields(value: Any, needed: set[str], more: set[str]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{value!r} is no JSON object")
    for name in sorted(needed - value.keys()):
        raise ValueError(f"{name} is missing")
    for name in sorted(value.keys() - needed - more):
        raise ValueError(f"{name!r} is none of {', '.join(sorted(needed | more))}")
    return value


def _turn(fields: dict[str, Any], think_s: float) -> Turn:
    prompt, output = fields["prompt"], fields["output_tokens"]
    if isinstance(prompt, list) and prompt and all(_is_int(p) and p >= 0 for p in prompt):
        prompt = tuple(prompt)
    elif not (isinstance(prompt, str) and prompt) and not (_is_int(prompt) and prompt >= 1):
        raise ValueError(f"prompt = {prompt!r}: it must be text, ids, or how many ids, at least 1")
    if not _is_int(output) or output < 1:
        raise ValueError(f"output_tokens = {output!r}: it must be an integer, at least 1")
    return Turn(prompt, output, think_s)


def _seconds(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"{name} = {value!r}: it must be seconds, at least 0")
    return float(value)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
