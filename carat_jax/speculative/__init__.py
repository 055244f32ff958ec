"""Speculative decoding: a drafter guesses, the model checks many guesses in one pass."""

from carat_jax.speculative.acceptance import Exact, Rule, Verdict
from carat_jax.speculative.loop import (
    Counts,
    Speculation,
    SpeculativeState,
    check_speculation,
    read_prompt,
    speculate,
    start,
)
from carat_jax.speculative.protocol import Drafter, Proposal, Target

__all__ = [
    "Counts",
    "Drafter",
    "Exact",
    "Proposal",
    "Rule",
    "Speculation",
    "SpeculativeState",
    "Target",
    "Verdict",
    "check_speculation",
    "read_prompt",
    "speculate",
    "start",
]
