"""Time and memory of prefilling a long prompt of a published shape with random weights."""

import argparse
import time
from typing import Any

import jax
import jax.numpy as jnp

from carat_jax import generate
from carat_jax.bench import random_model, report
from carat_jax.config import GemmaConfig
from carat_jax.kv_state import init_state
from carat_jax.memory import memory_estimate
from carat_jax.model import Params
from carat_jax.options import GenerateOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `carat bench prefill`."""
    random_model.add_config(parser)
    parser.add_argument(
        "--prompt",
        nargs="+",
        type=int,
        default=[2048, 8192, 32768],
        metavar="N",
        help="one or more prompt lengths (default 2048 8192 32768)",
    )
    parser.add_argument(
        "--max-context",
        type=int,
        default=32768 + 64,
        metavar="N",
        help="tokens the state holds, which sets its memory (default 32832)",
    )
    random_model.add_dtype(parser)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Prefills each prompt, generates a few tokens, and reports times and peak memory."""
    if min(args.prompt) < 1:
        raise ValueError(f"--prompt {min(args.prompt)}: it must be at least 1")
    if max(args.prompt) + generate.DECODE_STEPS > args.max_context:
        raise ValueError(
            f"prompt {max(args.prompt):,} + {generate.DECODE_STEPS} tokens exceeds "
            f"--max-context {args.max_context:,}"
        )
    report.say(f"{args.config}: weights")
    config, params = random_model.make(args.config, args.dtype)
    estimate = memory_estimate(config, 1, args.max_context)
    rows = []
    for length in args.prompt:
        for size in sorted(set(generate.prefill_plan(length, 1))):
            _generate(params, config, size // 2 + 1, args.max_context)  # compiles
        report.say(f"prompt of {length:,}: compiled")
        ttft, tpot = _generate(params, config, length, args.max_context)
        report.say(f"prompt of {length:,}: {ttft:.3f} s to the first token")
        peak = report.peak_memory()
        rows.append(
            {
                "config": args.config,
                "prompt": length,
                "max_context": args.max_context,
                "ttft_s": round(ttft, 3),
                "tokens_per_s": round(length / ttft),
                "decode_ms": round(tpot * 1e3, 2),
                "peak_gb": report.rounded(peak and peak / 1e9, 2),
                "estimate_gb": round(estimate / 1e9, 2),
                "peak_over_estimate": report.rounded(peak and peak / estimate, 4),
            }
        )
    return {"benchmark": "prefill", "environment": report.environment(), "rows": rows}


def table(result: dict[str, Any]) -> str:
    """One line for each prompt length."""
    columns = list(result["rows"][0])
    return report.table(columns, [[row[c] for c in columns] for row in result["rows"]])


def _generate(
    params: Params, config: GemmaConfig, length: int, max_context: int
) -> tuple[float, float]:
    """Seconds to the first token, and for each of the tokens after it."""
    ids = random_model.random_ids(config, 1, length)
    begin = time.perf_counter()
    state = init_state(config, 1, max_context)
    last = jnp.zeros((1, config.hidden_size), jnp.dtype(config.dtype))
    for tokens, new in generate.prefill_pieces(ids):
        last, state = generate.prefill_chunk(params, config, tokens, state, new, last)
    options = GenerateOptions(max_new_tokens=generate.DECODE_STEPS)
    controls = generate.Controls.of(options, generate.row_keys(0, 1))
    first, state = generate.begin(params, config, last, state, controls)
    jax.device_get(first)
    ttft = time.perf_counter() - begin
    steps = generate.DECODE_STEPS - 1
    out, state = generate.decode(
        params, config, state, jnp.int32(steps), jnp.zeros((1,), bool), size=generate.DECODE_STEPS
    )
    if int(out.num_tokens[0]) != steps:
        raise RuntimeError("the row ended early: the logits are not finite")
    return ttft, (time.perf_counter() - begin - ttft) / steps
