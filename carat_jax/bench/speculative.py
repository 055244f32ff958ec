"""Time of a speculative round against a plain decode step, at a scripted acceptance.

Weights are random, so no drafter could be right: which proposals stand is scripted, by the shares
given. The drafter is the published assistant's shape and does its whole work.

Calls of many rounds follow each other without waiting (`bench.calls`).
"""

import argparse
import dataclasses
import functools
import statistics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from carat_jax import generate
from carat_jax.bench import calls, random_model, report
from carat_jax.config import GemmaConfig
from carat_jax.kv_state import KVState, abstract_state
from carat_jax.model import Params, forward
from carat_jax.options import GenerateOptions
from carat_jax.speculative import (
    Speculation,
    SpeculativeState,
    check_speculation,
    draft,
    speculate,
    start,
)
from carat_jax.speculative.acceptance import Forced
from carat_jax.speculative.drafters.assistant import Assistant
from carat_jax.speculative.drafters.assistant_config import AssistantConfig

STEPS, ROUNDS = 32, 16  # of a call
# Reported for Google's drafter of 31B: in which share of the rounds each proposal stood.
ACCEPTANCE = (0.92, 0.78, 0.67, 0.57)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `carat bench speculative`."""
    random_model.add_config(parser)
    parser.add_argument(
        "--acceptance",
        nargs="+",
        type=float,
        default=list(ACCEPTANCE),
        metavar="X",
        help="share of the rounds in which each proposal stands; as many proposals as shares "
        "(default .92 .78 .67 .57)",
    )
    parser.add_argument(
        "--batch",
        nargs="+",
        type=int,
        default=[1],
        metavar="N",
        help="one or more numbers of sequences (default 1)",
    )
    parser.add_argument(
        "--context",
        type=int,
        default=6005,
        metavar="N",
        help="tokens that each sequence looks back on (default 6005)",
    )
    random_model.add_dtype(parser)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measures every batch size; see `table` for the fields."""
    if args.context < 2 or min(args.batch) < 1:
        raise ValueError(f"--context {args.context} must be at least 2, --batch at least 1")
    rule, K = Forced.at_rates(args.acceptance), len(args.acceptance)
    shape = _in_dtype(AssistantConfig.preset(args.config), args.dtype)
    speculation = Speculation(Assistant.abstract(shape), K, rule)
    config = GemmaConfig.preset(args.config)
    check_speculation(speculation, abstract_state(config, 1, args.context + K + 1), config)
    report.say(f"{args.config}: weights")
    config, params = random_model.make(args.config, args.dtype)
    drafter = Assistant.random(shape, jax.random.key(1))
    speculation = dataclasses.replace(speculation, drafter=drafter)
    rows = []
    for batch in args.batch:
        report.say(f"batch {batch}")
        row = {"config": args.config, "batch": batch, "context": args.context, "proposals": K}
        rows.append(row | _measure(params, config, speculation, batch, args.context))
    environment = report.environment()
    return {
        "benchmark": "speculative",
        "acceptance": "scripted",
        "environment": environment,
        "rows": rows,
    }


def table(result: dict[str, Any]) -> str:
    """One line for each batch size, and one for the proposals that were accepted there."""
    columns = {
        "config": "config",
        "batch": "batch",
        "context": "context",
        "proposals": "K",
        "step_ms": "plain step ms",
        "draft_ms": "draft ms",
        "verify_ms": "verify ms",
        "round_ms": "round ms",
        "loop_share": "loop share",
        "acceptance_length": "tokens a round",
        "ms_per_token": "ms a token",
        "speedup": "speed-up",
    }
    rows = [[row[key] for key in columns] for row in result["rows"]]
    lines = ["acceptance is scripted", report.table(list(columns.values()), rows)]
    return "\n".join([*lines, *map(_accepted, result["rows"])])


def _accepted(row: dict[str, Any]) -> str:
    """How many proposals stood, and in which share of the rounds each did."""
    shares = "  ".join(f"{share:.3f}" for share in row["per_position"])
    return (
        f"batch {row['batch']}: {row['accepted']:,} of {row['drafted']:,} proposals accepted; "
        f"by position: {shares}"
    )


def _measure(
    params: Params, config: GemmaConfig, speculation: Speculation, batch: int, context: int
) -> dict[str, Any]:
    drafter, K = speculation.drafter, speculation.num_proposals
    rounds = min(ROUNDS, max(1, context // (2 * (K + 1))))
    steps = min(STEPS, context // 2)
    behind = context - max(rounds * (K + 1), steps)
    kv = random_model.used_state(config, batch, context + K + 1, behind)
    token = jnp.asarray(random_model.random_ids(config, batch, 1)[:, 0])
    options = GenerateOptions(max_new_tokens=2**30)
    state = generate.DecodeState(
        kv=kv,
        token=token.copy(),  # the calls take the state's arrays for themselves
        generated=jnp.zeros_like(token),
        finish=jnp.zeros_like(token),
        controls=generate.Controls.of(options, generate.row_keys(0, batch)),
    )
    stopped = jnp.zeros((batch,), bool)
    length = jnp.full((batch,), behind, jnp.int32)

    def decode(state: generate.DecodeState) -> tuple[Any, generate.DecodeState]:
        state = state.replace(kv=state.kv.replace(length=length.copy()))
        return generate.decode(
            params, config, state, jnp.int32(steps), stopped, size=generate.DECODE_STEPS
        )

    step, _, state = calls.seconds(decode, state, steps)

    hidden = jax.random.normal(jax.random.key(2), (batch, config.hidden_size), config.dtype)
    speculative = start(drafter, drafter.init(config, batch, context + K + 1), hidden, state)
    counted = []

    def rewound(state: SpeculativeState) -> SpeculativeState:
        kv = state.decode.kv.replace(length=length.copy())
        return state.replace(decode=state.decode.replace(kv=kv))

    def rounds_of(state: SpeculativeState) -> tuple[Any, SpeculativeState]:
        # Keys of its own: what stands is drawn by key and position, and positions come again.
        controls = state.decode.controls
        sampling = controls.sampling.replace(keys=generate.row_keys(len(counted), batch))
        controls = controls.replace(sampling=sampling)
        state = state.replace(decode=state.decode.replace(controls=controls))
        tokens, counts, state = speculate(
            params,
            config,
            drafter,
            speculation.rule,
            rewound(state),
            jnp.int32(rounds),
            stopped,
            num_proposals=K,
            size=rounds * (K + 1),
        )
        counted.append(counts)
        return tokens, state

    round_, out, speculative = calls.seconds(rounds_of, speculative, rounds)
    counts = jax.tree.map(lambda *calls: sum(map(np.asarray, calls)), *counted)
    if int(out.num_tokens.min()) < rounds:
        raise RuntimeError("a row ended early: the logits are not finite")
    passes, accepted = int(counts.rounds.sum()), int(counts.accepted.sum())
    mean = 1 + accepted / passes

    def draft_alone(state: SpeculativeState) -> tuple[Any, SpeculativeState]:
        guesses = draft(params, config, drafter, state, jnp.int32(ROUNDS), num_proposals=K)
        return guesses, state

    drafting, _, speculative = calls.seconds(draft_alone, rewound(speculative), ROUNDS)
    kv = rewound(speculative).decode.kv
    verify = functools.partial(_verify, params, config, batch, K, length)
    verifying, _, _ = calls.seconds(verify, kv, ROUNDS)
    step_s, round_s, draft_s, verify_s = map(statistics.median, (step, round_, drafting, verifying))
    return {
        "step_ms": round(step_s * 1e3, 3),
        "draft_ms": round(draft_s * 1e3, 3),
        "verify_ms": round(verify_s * 1e3, 3),
        "round_ms": round(round_s * 1e3, 3),
        "loop_share": round((round_s - draft_s - verify_s) / round_s, 3),
        "rounds": passes,
        "drafted": int(counts.drafted.sum()),
        "accepted": accepted,
        "acceptance_length": round(mean, 2),
        "per_position": [round(float(n) / passes, 3) for n in counts.per_position.sum(0)],
        "ms_per_token": round(round_s / mean * 1e3, 3),
        "speedup": round(step_s * mean / round_s, 2),
    }


def _verify(
    params: Params, config: GemmaConfig, batch: int, K: int, length: jax.Array, kv: KVState
) -> tuple[jax.Array, KVState]:
    """The target over K + 1 positions, ROUNDS times at the same place."""
    tokens, logits = jnp.zeros((batch, K + 1), jnp.int32), None
    for _ in range(ROUNDS):
        logits, kv = _forward(params, config, tokens, kv.replace(length=length.copy()))
    return logits, kv


def _in_dtype(config: AssistantConfig, dtype: str) -> AssistantConfig:
    return dataclasses.replace(config, text=dataclasses.replace(config.text, dtype=dtype))


_forward = jax.jit(forward, static_argnums=1, donate_argnums=3)
