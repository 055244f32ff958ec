"""Speculative decoding: a drafter guesses, the model checks many guesses in one pass."""

from carat_jax.speculative.acceptance import Exact, Forced, Rule, Typical, Verdict
from carat_jax.speculative.drafters.assistant import Assistant
from carat_jax.speculative.drafters.model import Model
from carat_jax.speculative.drafters.ngram import Ngram
from carat_jax.speculative.drafters.scripted import Scripted
from carat_jax.speculative.loop import (
    Counts,
    SpeculativeState,
    draft,
    read_prompt,
    speculate,
    start,
)
from carat_jax.speculative.protocol import Drafter, Proposal, Target
from carat_jax.speculative.speculation import (
    NUM_PROPOSALS,
    NumProposals,
    Speculation,
    check_speculation,
)

__all__ = [
    "NUM_PROPOSALS",
    "Assistant",
    "Counts",
    "Drafter",
    "Exact",
    "Forced",
    "Model",
    "Ngram",
    "NumProposals",
    "Proposal",
    "Rule",
    "Scripted",
    "Speculation",
    "SpeculativeState",
    "Target",
    "Typical",
    "Verdict",
    "check_speculation",
    "draft",
    "read_prompt",
    "speculate",
    "start",
]
