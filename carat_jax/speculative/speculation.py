"""How a generation is to speculate: what a caller gives for it, checked against the model."""

import dataclasses
from typing import Literal

from carat_jax.attention import MAX_DECODE_TOKENS
from carat_jax.config import GemmaConfig
from carat_jax.kv_state import KVState, max_decode_tokens
from carat_jax.speculative.acceptance import Exact, Forced, Rule
from carat_jax.speculative.protocol import Drafter

NumProposals = int | Literal["auto"]
NUM_PROPOSALS = 4  # where nothing else is asked for


@dataclasses.dataclass(frozen=True)
class Speculation:
    """How a generation is to speculate.

    Attributes:
      drafter: what proposes.
      num_proposals: K, tokens proposed in a round; "auto" = as many as pay (see `auto.Auto`).
      rule: which of them stand.
      profile: time drafting and verifying apart (see `Stats`); drafting is done twice for that.
    """

    drafter: Drafter
    num_proposals: NumProposals = NUM_PROPOSALS
    rule: Rule = dataclasses.field(default_factory=Exact)
    profile: bool = False

    @classmethod
    def of(
        cls,
        drafter: Drafter | None,
        num_proposals: NumProposals,
        acceptance: Rule | None,
        profile: bool = False,
    ) -> "Speculation | None":
        """From the arguments that calls have for it: None without a drafter.

        Raises:
          ValueError: no drafter, and another argument that is not at its default.
        """
        if drafter is not None:
            return cls(
                drafter, num_proposals, Exact() if acceptance is None else acceptance, profile
            )
        for name, value, default in (
            ("num_proposals", num_proposals, NUM_PROPOSALS),
            ("acceptance", acceptance, None),
            ("profile", profile, False),
        ):
            if value != default:
                raise ValueError(f"{name} = {value!r} is for a drafter: give one, or leave it out")
        return None


def check_speculation(speculation: Speculation, state: KVState, config: GemmaConfig) -> int:
    """The largest K of which the proposals and the token before them fit one step.

    Args:
      state: of the target, or its shapes.

    Raises:
      ValueError: the K asked for is none or larger; the drafter is no drafter, or does not
        propose; or the rule is no rule.
    """
    drafter, K = speculation.drafter, speculation.num_proposals
    if not isinstance(drafter, Drafter):
        raise ValueError(
            f"drafter is a {type(drafter).__name__}: give what `load_drafter` returns, or a "
            "`speculative.Drafter` of your own"
        )
    if type(drafter).propose is Drafter.propose:
        raise ValueError(
            f"{type(drafter).__name__} has no `propose`: a drafter must define it, see "
            "`speculative.Drafter`"
        )
    if not isinstance(speculation.rule, Rule):
        raise ValueError(
            f"acceptance = {speculation.rule!r}: give a rule, `speculative.Exact()` or "
            "`speculative.Typical(…)`"
        )
    most = most_proposals(drafter, state, config)
    if K == "auto":
        if isinstance(speculation.rule, Forced):
            raise ValueError(
                "num_proposals = 'auto': Forced has probabilities for one number of proposals "
                f"only: give {speculation.rule.probabilities.shape[0]}"
            )
    elif isinstance(K, bool) or not isinstance(K, int) or not 1 <= K <= most:
        raise ValueError(
            f"num_proposals = {K!r}: {type(drafter).__name__} and the slack of the rings allow "
            f"1 to {most}, or 'auto'"
        )
    return most


def check_num_proposals(K: int, drafter: Drafter, state: KVState, config: GemmaConfig) -> None:
    """Raises ValueError for a K that no round on this state can have; 0 is plain decoding."""
    most = most_proposals(drafter, state, config)
    if not 0 <= K <= most:
        writable = max_decode_tokens(state, config)
        slack = "no rings" if writable is None else f"a slack of {writable - 1} in its rings"
        raise ValueError(
            f"num_proposals = {K}: a step verifies up to {MAX_DECODE_TOKENS - 1}, "
            f"{type(drafter).__name__} proposes up to {drafter.max_proposals}, and the state has "
            f"{slack}: give 0 to {most}, or make the state with more slack (`init_state`)"
        )


def most_proposals(drafter: Drafter, state: KVState, config: GemmaConfig) -> int:
    """The largest K: a step of K + 1 positions must be one that can be rolled back."""
    writable = max_decode_tokens(state, config)
    step = MAX_DECODE_TOKENS if writable is None else min(MAX_DECODE_TOKENS, writable)
    return min(step - 1, drafter.max_proposals)
