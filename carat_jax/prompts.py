"""What a prompt may be: text, or token ids in any form that can be read as integers."""

import numbers
import reprlib
from collections.abc import Mapping, Sequence

import numpy as np

Prompt = str | Sequence[int]


def is_single(prompt: Prompt | Sequence[Prompt]) -> bool:
    """A string or flat ids, as against a list of prompts.

    Raises:
      ValueError: neither.
    """
    if isinstance(prompt, str):
        return True
    if hasattr(prompt, "ndim"):
        return prompt.ndim < 2
    if not isinstance(prompt, Sequence):
        raise ValueError(f"prompt is a {type(prompt).__name__}: give a string, ids, or a list")
    first = prompt[0] if len(prompt) else None
    return not (isinstance(first, str | Sequence) or getattr(first, "ndim", 0))


def checked_ids(prompt: Sequence[int], vocab_size: int) -> list[int]:
    """The ids of a prompt that is not text.

    Raises:
      ValueError: no ids, or none that a model with this vocabulary has; the message says what was
        found in their place.
    """
    if isinstance(prompt, bytes | bytearray):
        raise ValueError("prompt is bytes: give a string, `prompt.decode()`, or a list of ids")
    if not (isinstance(prompt, Sequence) or getattr(prompt, "ndim", 0)):
        raise ValueError(f"{_show(prompt)} in place of a prompt: give a string, or a list of ids")
    if not len(prompt):
        raise ValueError("empty prompt: give at least one id")
    try:
        ids = np.asarray(prompt)
    except ValueError:  # lists of several lengths
        ids = None
    if ids is None or ids.ndim != 1:
        shape = "" if ids is None else f" (shape {ids.shape})"
        raise ValueError(f"nested ids{shape}: a prompt is a flat list of them")
    if ids.dtype.kind in "OSU":  # what NumPy makes of anything but numbers, and of large integers
        others = [x for x in prompt if not isinstance(x, numbers.Integral)]
        if others and isinstance(others[0], Mapping):
            raise ValueError(
                "prompt is a list of messages: give them to `chat`; here, text or ids are taken"
            )
        if others:
            raise ValueError(f"{_show(others[0])} among the ids of a prompt: they must be integers")
    elif not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"prompt ids are {ids.dtype}: they must be integers")
    wrong = ids[(ids < 0) | (ids >= vocab_size)]
    if wrong.size:
        raise ValueError(f"prompt id {wrong[0]}: ids go from 0 to {vocab_size - 1}")
    return ids.tolist()


def _show(value: object) -> str:
    return f"{reprlib.repr(value)} ({type(value).__name__})"
