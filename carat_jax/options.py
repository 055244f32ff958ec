"""GenerateOptions: what a caller may ask of a generation, checked before anything is compiled."""

import dataclasses
import json
import numbers
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MAX_TOP_LOGPROBS = 128


class OptionError(ValueError):
    """An option out of its range; the message names it, the value and the range."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """Options of a generation. Sequences are stored as tuples.

    Attributes:
      max_new_tokens: at least 1.
      temperature: 0 = the most likely token always.
      top_k: sample among the k most likely; 0 = all.
      top_p: … among the fewest whose probabilities add up to this, in (0, 1].
      min_p: … among those at least this probable relative to the most likely, in [0, 1].
      seed: one int, or one for each prompt of a batch. Row i of a batch with one seed draws from
        the seed's i-th stream; with a list, row i draws what it would draw alone with seed[i].
      stop: strings that end the text; they are cut off.
      stop_token_ids: ids that end it; the id is the last of `tokens`. () = never stop on an id.
      suppress_tokens: ids that are never chosen.
      logprobs: True for those of the chosen tokens, k for the k most likely as well.

    Raises:
      OptionError: from the constructor.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | tuple[int, ...] = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    suppress_tokens: tuple[int, ...] = ()
    logprobs: bool | int = False

    def __post_init__(self) -> None:
        for name in ("stop", "stop_token_ids", "suppress_tokens"):
            object.__setattr__(self, name, _as_tuple(name, getattr(self, name)))
        if not _is_int(self.seed):
            object.__setattr__(self, "seed", _as_tuple("seed", self.seed))
        _check(self)

    @property
    def num_logprobs(self) -> int | None:
        """None: no log-probabilities; 0: of the chosen tokens; k: of the k most likely too."""
        if self.logprobs is False:
            return None
        return 0 if self.logprobs is True else int(self.logprobs)

    @classmethod
    def from_generation_config(cls, path: Path) -> "GenerateOptions":
        """The defaults that a checkpoint states; greedy and stopping at id 1 where it does not.

        Args:
          path: generation_config.json; it may be absent.

        Raises:
          OptionError: not JSON, or a value out of its range.
        """
        if not path.is_file():
            return cls(stop_token_ids=(1,))
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, nested too deep
            raise OptionError(f"{path} is not valid JSON: {error}") from error
        if not isinstance(raw, dict):
            raise OptionError(f"{path} holds a {type(raw).__name__}, not a JSON object")
        stop = raw.get("eos_token_id")
        given: dict[str, Any] = {
            "stop_token_ids": (1,) if stop is None else (stop,) if _is_int(stop) else stop,
            "suppress_tokens": raw.get("suppress_tokens") or (),
        }
        if raw.get("do_sample"):
            given["temperature"] = 1.0
            for name in ("temperature", "top_k", "top_p", "min_p"):
                if raw.get(name) is not None:
                    given[name] = raw[name]
        try:
            return cls(**given)
        except OptionError as error:
            raise OptionError(f"{path}: {error}") from error

    def replace(self, **changes: Any) -> "GenerateOptions":
        """A copy with some options changed.

        Raises:
          OptionError: no such option, or a value out of its range.
        """
        known = {field.name for field in dataclasses.fields(self)}
        for name in changes:
            if name not in known:
                raise OptionError(f"no option {name!r}: there are {', '.join(sorted(known))}")
        return dataclasses.replace(self, **changes)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises OptionError for ids that a model with this vocabulary does not have."""
        for name in ("stop_token_ids", "suppress_tokens"):
            for token in getattr(self, name):
                if token >= vocab_size:
                    raise OptionError(f"{name} has {token}: ids go to {vocab_size - 1}")
        if len(set(self.suppress_tokens)) >= vocab_size:
            raise OptionError("suppress_tokens leaves no token to choose")
        if (self.num_logprobs or 0) > vocab_size:
            raise OptionError(f"logprobs = {self.logprobs}: the vocabulary has {vocab_size} ids")


def _is_int(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _as_tuple(name: str, value: Any) -> tuple:
    if value is None and name != "seed":
        return ()
    if isinstance(value, str):
        return (value,)
    if hasattr(value, "__array__"):  # of NumPy or JAX: plain numbers can be hashed and compared
        value = value.tolist()
    if not isinstance(value, Sequence):
        raise OptionError(f"{name} = {value!r}: give {'an integer or ' * (name == 'seed')}a list")
    return tuple(value)


def _check(o: GenerateOptions) -> None:
    def number(name: str, low: float, high: float, open_low: bool = False) -> None:
        value = getattr(o, name)
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise OptionError(f"{name} = {value!r}: it must be a number")
        if not low <= value <= high or (open_low and value == low):  # NaN is in no range
            interval = f"in {'(' if open_low else '['}{low:g}, {high:g}]"
            limit = f"at least {low:g} and finite" if high == _LARGEST else interval
            raise OptionError(f"{name} = {value}: it must be {limit}")

    number("temperature", 0.0, _LARGEST)
    number("top_p", 0.0, 1.0, open_low=True)
    number("min_p", 0.0, 1.0)
    for name, low in (("max_new_tokens", 1), ("top_k", 0)):
        value = getattr(o, name)
        if not _is_int(value) or not low <= value < 2**31:
            raise OptionError(f"{name} = {value!r}: it must be an integer in [{low}, 2**31)")
    for seed in o.seed if isinstance(o.seed, tuple) else (o.seed,):
        if not _is_int(seed) or not 0 <= seed < 2**32:
            raise OptionError(f"seed = {seed!r}: it must be an integer in [0, 2**32)")
    for text in o.stop:
        if not isinstance(text, str) or not text:
            raise OptionError(f"stop has {text!r}: it takes strings that are not empty")
    for name in ("stop_token_ids", "suppress_tokens"):
        for token in getattr(o, name):
            if not _is_int(token) or not 0 <= token < 2**31:
                raise OptionError(f"{name} has {token!r}: it takes token ids, from 0 on")
    if not isinstance(o.logprobs, bool) and not (
        _is_int(o.logprobs) and 0 <= o.logprobs <= MAX_TOP_LOGPROBS
    ):
        raise OptionError(
            f"logprobs = {o.logprobs!r}: True, False, or how many alternatives, "
            f"0 to {MAX_TOP_LOGPROBS}"
        )


_LARGEST = 3.4e38  # of float32
