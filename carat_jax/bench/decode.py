"""Time of a decode step of a published shape with random weights, against its floor.

The floor: every weight the step uses (a mixture reads only the experts its rows visit), the
rings and the live global keys and values, each read once at the device's measured bandwidth.

Calls of many steps follow each other without waiting (`bench.calls`).
"""

import argparse
import dataclasses
import itertools
import math
import re
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from carat_jax import generate, memory, sharding
from carat_jax.bench import calls, random_model, report
from carat_jax.config import PRESETS, GemmaConfig
from carat_jax.kv_state import KVState, init_state
from carat_jax.model import Params, forward, head
from carat_jax.options import GenerateOptions
from carat_jax.params import init_params

STEPS = 32  # of a call
LARGEST_ERROR = 0.05  # ‖decode - prefill‖ / ‖prefill‖ of logits; beyond it a row is void
PROMPT = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `carat bench decode`."""
    parser.add_argument(
        "--config",
        nargs="+",
        choices=list(PRESETS),
        default=["31b"],
        metavar="SIZE",
        help=f"one or more of {', '.join(PRESETS)} (default 31b)",
    )
    parser.add_argument(
        "--batch",
        nargs="+",
        type=int,
        default=[1, 8],
        metavar="N",
        help="one or more numbers of sequences decoded together (default 1 8)",
    )
    parser.add_argument(
        "--context",
        nargs="+",
        type=int,
        default=[8192],
        metavar="N",
        help="one or more numbers of tokens that each sequence looks back on (default 8192)",
    )
    parser.add_argument(
        "--devices",
        type=int,
        default=1,
        metavar="N",
        help="cut the model over N devices; floor and GB/s are then of each (default 1)",
    )
    random_model.add_dtype(parser)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measures every (size, batch, context); see `table` for the fields."""
    shortest = min(args.context)
    if shortest < 2 or min(args.batch) < 1:
        raise ValueError(f"--context {shortest} must be at least 2, --batch at least 1")
    rows = []
    mesh = None if args.devices == 1 else sharding.mesh(model=args.devices)
    for name in args.config:
        report.say(f"{name}: decode against prefill")
        error = _decode_error(_short(name, args.dtype), mesh)
        report.say(f"{name}: weights")
        config, params = random_model.make(name, args.dtype, mesh)
        report.say(f"{name}: first token")
        seconds = _first_token(params, config)
        shared = {
            "config": name,
            "devices": args.devices,
            "first_token_s": round(seconds, 2),
            "decode_vs_prefill": float(f"{error:.2e}"),
            "void": not error <= LARGEST_ERROR,
        }
        for batch, context in itertools.product(args.batch, args.context):
            report.say(f"{name}: batch {batch}, context {context}")
            rows.append(shared | _measure(params, config, batch, context))
        del params
        jax.clear_caches()
    return {"benchmark": "decode", "environment": report.environment(), "rows": rows}


def table(result: dict[str, Any]) -> str:
    """One line for each (size, batch, context)."""
    columns = {
        "config": "config",
        "devices": "devices",
        "batch": "batch",
        "context": "context",
        "ms": "ms/step",
        "floor_ms": "floor ms",
        "ratio": "× floor",
        "gb_per_s": "GB/s",
        "tokens_per_s": "tokens/s",
        "compile_s": "compile s",
        "first_token_s": "first token s",
        "peak_gb": "peak GB",
        "large_copies": "copies > 1 MiB",
        "collectives": "collectives",
        "decode_vs_prefill": "rel. error",
        "void": "void",
    }
    return report.table(
        list(columns.values()), [[row[key] for key in columns] for row in result["rows"]]
    )


def _measure(params: Params, config: GemmaConfig, batch: int, context: int) -> dict[str, Any]:
    steps = min(STEPS, context // 2)
    mesh = sharding.mesh_of(params)
    kv = random_model.used_state(config, batch, context, context - steps, mesh)
    tokens = jnp.asarray(random_model.random_ids(config, batch, 1)[:, 0])
    options = GenerateOptions(max_new_tokens=2**30)
    state = generate.DecodeState(
        kv=kv,
        token=tokens,
        generated=jnp.zeros_like(tokens),
        finish=jnp.zeros_like(tokens),
        controls=generate.Controls.of(options, generate.row_keys(0, batch)),
    )
    state, stopped = sharding.place((state, jnp.zeros((batch,), bool)), mesh)
    lowered = generate.decode.lower(
        params, config, state, jnp.int32(steps), stopped, size=generate.DECODE_STEPS
    )
    begin = time.perf_counter()
    compiled = lowered.compile()
    compile_s = time.perf_counter() - begin
    count = jnp.int32(steps)

    def decode(state: generate.DecodeState) -> tuple[Any, generate.DecodeState]:
        rewound = state.kv.replace(length=jnp.full_like(state.kv.length, context - steps))
        return compiled(params, state.replace(kv=rewound), count, stopped)

    times, out, state = calls.seconds(decode, state, steps)
    if not (np.asarray(out.num_tokens) == steps).all():
        raise RuntimeError("a row ended early: the logits are not finite")
    seconds = statistics.median(times)
    read = memory.step_bytes(config, batch, context, mesh)
    bandwidth = report.read_bandwidth()
    floor = read.floor_s(bandwidth) if bandwidth else None
    peak, hlo = report.peak_memory(), compiled.as_text()
    return {
        "batch": batch,
        "context": context,
        "ms": round(seconds * 1e3, 3),
        "ms_min": round(min(times) * 1e3, 3),
        "ms_max": round(max(times) * 1e3, 3),
        "floor_ms": report.rounded(floor and floor * 1e3, 3),
        "ratio": report.rounded(floor and seconds / floor, 3),
        "gb_per_s": round(read.total / seconds / 1e9),
        "tokens_per_s": round(batch / seconds, 1),
        "weights_bytes": read.weights + read.experts,
        "kv_bytes": read.kv,
        "compile_s": round(compile_s, 1),
        "peak_gb": report.rounded(peak and peak / 1e9, 2),
        "large_copies": len(large_copies(hlo)),
        "collectives": collectives(hlo),
    }


def large_copies(hlo: str, at_least: int = 1 << 20) -> list[str]:
    """Instructions of optimised HLO that copy or transpose an array of `at_least` bytes.

    A decode step should have none: not of a cache, not of a weight.
    """
    sizes = {"bf16": 2, "f32": 4, "s32": 4, "u32": 4, "pred": 1}
    pattern = re.compile(r"= \(?(\w+)\[([\d,]+)\][^=]* (?:copy|copy-start|transpose)\(")
    return [
        match.string.strip()
        for line in hlo.splitlines()
        if (match := pattern.search(line))
        and sizes.get(match[1], 1) * math.prod(map(int, match[2].split(","))) >= at_least
    ]


def collectives(hlo: str) -> int:
    """Collective operations in optimised HLO: of a decode step, two a layer and two besides, or
    four where layers have inputs of their own."""
    names = "all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute"
    return len(re.findall(rf" (?:{names})(?:-start)?\(", hlo))


def _first_token(params: Params, config: GemmaConfig) -> float:
    """Seconds from having the weights to the first token of a short prompt, with tracing and
    compiling (or reading the compilation cache)."""
    begin = time.perf_counter()
    last, state = _prefill(params, config, PROMPT)
    controls = generate.Controls.of(GenerateOptions(), generate.row_keys(0, 1))
    first, state = generate.begin(params, config, last, state, controls)
    jax.device_get(first)
    return time.perf_counter() - begin


def _decode_error(config: GemmaConfig, mesh: Mesh | None = None) -> float:
    """‖decode - prefill‖ / ‖prefill‖ of the logits at the last of PROMPT tokens.

    Decoding must agree with prefilling, or its time means nothing.
    """
    params = _routed_alike(init_params(config, jax.random.key(0), mesh), config)
    last, _ = _prefill(params, config, PROMPT)
    whole = _head(params, config, last)[0]
    _, state = _prefill(params, config, PROMPT - 1)
    token = random_model.random_ids(config, 1, PROMPT)[:, -1:]
    stepped = _forward(params, config, token, state)[0][0, 0]
    return float(jnp.linalg.norm(stepped - whole) / jnp.linalg.norm(whole))


def _short(name: str, dtype: str) -> GemmaConfig:
    """A size with one layer of each kind, borrowing ones included.

    Random layers magnify the rounding of bfloat16, the more of them the more.
    """
    config = GemmaConfig.preset(name)
    kinds = ("sliding_attention", "full_attention")
    borrowed = kinds if config.num_kv_shared_layers else ()
    return dataclasses.replace(
        config,
        num_hidden_layers=len(kinds + borrowed),
        num_kv_shared_layers=len(borrowed),
        layer_types=kinds + borrowed,
        dtype=dtype,
    )


def _routed_alike(params: Params, config: GemmaConfig) -> Params:
    """Routers of zeros, and shares that differ: tokens all visit the first experts.

    Random routers are nearly tied, and rounding alone would send a token to other experts, decoded
    or prefilled. Of equal logits, `choose_experts` takes those of the first experts, however they
    are computed; so a mixture's own kernels are compared, in its own dtype and shapes.
    """
    for spec in config.layers if config.num_experts else ():
        experts = params[f"layers_{spec.index}"]["experts"]
        experts["router"] = jnp.zeros_like(experts["router"])
        shares = 1 + jnp.arange(config.num_experts)
        experts["per_expert_scale"] *= shares.astype(experts["per_expert_scale"].dtype)
    return params


def _prefill(params: Params, config: GemmaConfig, length: int) -> tuple[jax.Array, KVState]:
    """Feeds the first `length` of PROMPT tokens, padded to PROMPT."""
    mesh = sharding.mesh_of(params)
    state = init_state(config, 1, generate.MIN_CAPACITY, mesh=mesh)
    last = sharding.place(jnp.zeros((1, config.hidden_size), jnp.dtype(config.dtype)), mesh)
    tokens = random_model.random_ids(config, 1, PROMPT)
    new = jnp.asarray([length], jnp.int32)
    return generate.prefill_chunk(params, config, tokens, state, new, last)


_head = jax.jit(head, static_argnums=1)
_forward = jax.jit(forward, static_argnums=1, donate_argnums=3)
