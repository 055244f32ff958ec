"""Throughput and latency of the engine under a workload: requests that come when they come.

Arrivals keep to their times however far the engine is behind (an open loop); within a
conversation each turn waits for the answer before. Stop ids are ignored, so that every answer is as
long as asked. What a run needs is compiled before it.
"""

import argparse
import dataclasses
import functools
import math
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from carat_jax import memory
from carat_jax.bench import random_model, report, serving_summary, workload
from carat_jax.bench.replay import (
    AS_ASKED,
    Ask,
    ask_engine,
    compilation_seconds,
    replay,
    reused_tokens,
)
from carat_jax.bench.speculative import ACCEPTANCE
from carat_jax.bench.static_batches import StaticBatches
from carat_jax.bench.workload import Conversation, Distribution
from carat_jax.config import GemmaConfig
from carat_jax.engine import Engine
from carat_jax.engine.prefix import Past
from carat_jax.engine.reading import Reader, chunk_sizes
from carat_jax.gemma import Gemma, load, load_drafter
from carat_jax.kv_state import init_state
from carat_jax.speculative import Assistant, Forced, Speculation
from carat_jax.speculative.drafters.assistant_config import AssistantConfig

MAKING = {  # what a workload is made from that is not read from a file
    "requests": 16,
    "rate": math.inf,
    "prompt": Distribution("lognormal", (128, 0.7)),
    "output": Distribution("fixed", (64,)),
    "turns": Distribution("fixed", (1,)),
    "follow_up": Distribution("fixed", (32,)),
    "think": Distribution("fixed", (1,)),
}
CHUNKS = 5  # of which the median is taken
EPILOG = f"""\
DIST is {workload.FORMS}.

A workload file has a JSON object on each line:
  {{"arrival_s": 1.5, "prompt": 512, "output_tokens": 128}}
prompt is a text, a list of ids, or how many random ids. A conversation adds its later turns,
each of which reads all before it:
  "then": [{{"think_s": 4, "prompt": 40, "output_tokens": 128}}]

"Longest chunk of a prompt" is the last --prefill-chunk tokens of the longest prompt, read alone
before the run: what a prompt may add to the time between two arrivals of another's tokens (ITL).

examples:
  carat bench serving                      16 requests at once to the bundled model
  carat bench serving --rate 2 --turns uniform:1:4 --write FILE
  carat bench serving --workload FILE --slots 1 3 8 16 --drafter none tiny --baselines
  carat bench serving --config 31b --drafter none assistant
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `carat bench serving`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    lengths = functools.partial(_distribution, least=1)
    seconds = functools.partial(_distribution, least=0)

    random_model.add_model(parser)

    add = parser.add_argument_group("workload", "Of a file, or drawn:").add_argument
    add("--workload", type=Path, metavar="FILE", help="replay this file")
    add("--requests", type=int, metavar="N", help="how many, or conversations (default 16)")
    add("--rate", type=float, metavar="X", help="that come in a second, Poisson (default inf)")
    add("--prompt", type=lengths, metavar="DIST", help="tokens (default lognormal:128:0.7)")
    add("--output", type=lengths, metavar="DIST", help="tokens (default fixed:64)")
    add("--turns", type=lengths, metavar="DIST", help="of a conversation (default fixed:1)")
    add(
        "--follow-up",
        type=lengths,
        metavar="DIST",
        help="tokens of a later turn (default fixed:32)",
    )
    add(
        "--think",
        type=seconds,
        metavar="DIST",
        help="seconds before a later turn (default fixed:1)",
    )
    add("--seed", type=int, default=0, metavar="N", help="another number, other draws (default 0)")
    add("--write", type=Path, metavar="FILE", help="write the workload, for --workload")

    add = parser.add_argument_group("runs", "Each drafter with each number of slots:").add_argument
    add("--slots", type=int, nargs="+", default=[8], metavar="N", help="at once (default 8)")
    add(
        "--drafter",
        nargs="+",
        default=["none"],
        metavar="DRAFTER",
        help="none (the default), ngram, tiny (for the bundled model), a folder or a hub id; for "
        "--config also assistant: the published shape with random weights",
    )
    add("--num-proposals", type=int, metavar="K", help="tokens guessed at once (default 4)")
    add(
        "--acceptance",
        type=float,
        nargs="+",
        metavar="X",
        help="scripted: the share of the rounds in which each guess stands, right or wrong; as "
        "many guesses as shares (assistant's default .92 .78 .67 .57)",
    )
    add(
        "--max-context",
        type=int,
        metavar="N",
        help="tokens that a slot has room for (default: the longest conversation)",
    )
    add(
        "--prefill-chunk",
        type=int,
        default=512,
        metavar="N",
        help="tokens of a prompt that are read before the others go on (default 512)",
    )
    add(
        "--baselines",
        action="store_true",
        help="also `generate` for one request after another, and for static batches of the slots",
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measures every run; `serving_summary` has the figures."""
    _check(args)
    conversations = _conversations(args)
    model, ids = _model(args, conversations)
    drafters = {name: _speculation(name, model, args) for name in args.drafter}
    bandwidth = report.read_bandwidth()
    sizes = {"max_context": args.max_context, "prefill_chunk": args.prefill_chunk}
    sizes["max_waiting"] = 10**6  # no one is turned away: arrivals do not hang on the engine

    def measure(label: str, drafter: str, slots: int, ask: Ask) -> dict[str, Any]:
        compiled = len(compilation_seconds())
        records, duration = replay(ask, conversations, ids)
        read = memory.step_bytes(model.config, slots, 1)
        floor = bandwidth and (read.weights + read.experts) / bandwidth
        failed = sum(len(c.turns) for c in conversations) - len(records)
        peak = report.peak_memory()
        figures = serving_summary.summary(records, failed, duration, slots, floor)
        run = label if drafter == "none" else f"{label} + {drafter}"
        rate, mean = figures["output_throughput"], figures["mean_tpot_ms"]
        report.say(f"{run}: {rate} tokens/s, mean TPOT {mean} ms")
        return {
            "run": run,
            "slots": slots,
            "drafter": drafter,
            **figures,
            "reused_tokens": None,
            "chunk_ms": None,
            "peak_gb": report.rounded(peak and peak / 1e9, 2),
            "compile_s": round(sum(compilation_seconds()[compiled:]), 2),
        }

    lengths = workload.lengths(conversations, ids)
    longest = max(prompt for prompt, _ in lengths)
    rows = []
    for drafter, speculation in drafters.items():
        for slots in args.slots:
            with Engine(model, slots=slots, **sizes, **speculation) as engine:
                report.say(f"{slots} slots, drafter {drafter}: compiles")
                engine.warm_up(**AS_ASKED)
                chunk = _chunk_seconds(model, args, speculation, longest)
                report.say("runs")
                before = reused_tokens(engine)
                ask = functools.partial(ask_engine, engine)
                rows.append(measure(f"{slots} slot{'s' * (slots > 1)}", drafter, slots, ask))
                rows[-1]["reused_tokens"] = reused_tokens(engine) - before
                rows[-1]["chunk_ms"] = round(1e3 * chunk, 2)
        for size in sorted({1, *args.slots}) if args.baselines else ():
            with StaticBatches(model, size, speculation) as batches:
                batches.warm_up(lengths)
                label = "sequential" if size == 1 else f"static {size}"
                rows.append(measure(label, drafter, size, batches.ask))
    made = {name: str(getattr(args, name)) for name in MAKING}
    if args.workload:
        made = {"file": str(args.workload)}
    return {
        "benchmark": "serving",
        "acceptance": "scripted" if args.acceptance else "of the drafter",
        "environment": report.environment(),
        "model": args.config or args.model,
        "max_context": args.max_context,
        "prefill_chunk": args.prefill_chunk,
        "num_proposals": args.num_proposals,
        "workload": {"seed": args.seed} | made,
        "rows": rows,
    }


def table(result: dict[str, Any]) -> str:
    """A line for each figure, a column for each run."""
    scripted = "acceptance is scripted\n" * (result["acceptance"] == "scripted")
    return scripted + serving_summary.table(result["rows"])


def _distribution(text: str, least: float) -> Distribution:
    try:
        return Distribution.parse(text, least)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _check(args: argparse.Namespace) -> None:
    """Checks what needs no model, and fills in the defaults."""
    random_model.check_model(args)
    for name, default in MAKING.items():
        if getattr(args, name) is None:
            setattr(args, name, default)
        elif args.workload:
            raise ValueError(f"--{name.replace('_', '-')} is for a workload without --workload")
    for name, values, most in (
        ("--requests", [args.requests], 10**6),
        ("--slots", args.slots, 256),
        ("--prefill-chunk", [args.prefill_chunk], 2048),
    ):
        for value in values:
            if not 1 <= value <= most:
                raise ValueError(f"{name} {value}: it must be from 1 to {most:,}")
    if not args.rate > 0:
        raise ValueError(f"--rate {args.rate:g}: it must be above 0, or inf")
    if set(args.drafter) == {"none"} and (args.acceptance or args.num_proposals):
        raise ValueError("--acceptance and --num-proposals are for a drafter: give --drafter too")
    if "assistant" in args.drafter:
        if not args.config:
            raise ValueError("--drafter assistant is for --config; of a model give its folder")
        args.acceptance = args.acceptance or list(ACCEPTANCE)
    if args.acceptance:
        Forced.at_rates(args.acceptance)  # for what it refuses
        if args.num_proposals not in (None, len(args.acceptance)):
            raise ValueError(
                f"--num-proposals {args.num_proposals} with {len(args.acceptance)} shares of "
                "--acceptance: leave it out"
            )
        args.num_proposals = len(args.acceptance)
    args.num_proposals = args.num_proposals or 4


def _conversations(args: argparse.Namespace) -> list[Conversation]:
    if args.workload:
        made = workload.read(args.workload)
    else:
        given = {name: getattr(args, name) for name in MAKING if name != "requests"}
        made = workload.make(conversations=args.requests, seed=args.seed, **given)
    if args.write:
        workload.write(args.write, made)
    return made


def _model(
    args: argparse.Namespace, conversations: list[Conversation]
) -> tuple[Gemma, list[list[list[int]]]]:
    """The model, and the ids of the workload; sets --max-context."""
    if args.config:
        config, tokenizer = GemmaConfig.preset(args.config), None
    else:
        model = load(args.model, dtype=args.dtype)
        config, tokenizer = model.config, model.tokenizer
    ids = workload.as_ids(conversations, config.vocab_size, tokenizer, args.seed)
    longest = max(map(sum, workload.lengths(conversations, ids)))
    args.max_context = args.max_context or longest
    limit = config.max_position_embeddings
    if not longest <= args.max_context <= limit:
        raise ValueError(
            f"--max-context {args.max_context:,}: it must be from {longest:,}, the longest "
            f"conversation, to {limit:,}, the model's own"
        )
    if args.config:
        model = random_model.gemma(args.config, args.dtype)
    return model, ids


def _speculation(name: str, model: Gemma, args: argparse.Namespace) -> dict[str, Any]:
    """Keywords of `Engine` and `Gemma.generate`."""
    if name == "none":
        return {}
    if name == "assistant":
        shape = AssistantConfig.preset(args.config)
        text = dataclasses.replace(shape.text, dtype=model.config.dtype)
        drafter = Assistant.random(dataclasses.replace(shape, text=text), jax.random.key(1))
    else:
        drafter = load_drafter(name, model)
    rule = Forced.at_rates(args.acceptance) if args.acceptance else None
    return {"drafter": drafter, "num_proposals": args.num_proposals, "acceptance": rule}


def _chunk_seconds(
    model: Gemma, args: argparse.Namespace, speculation: dict[str, Any], longest: int
) -> float:
    """How long the engine reads the last chunk of a prompt of so many tokens, with nothing beside
    it: the median of a few."""
    spec = Speculation.of(**speculation) if speculation else None
    chunks = chunk_sizes(args.prefill_chunk)
    reader = Reader(model.params, model.config, args.max_context, chunks, spec)
    before = max(longest - args.prefill_chunk, 0)

    def once() -> float:
        kv = init_state(model.config, 1, args.max_context)
        kv = kv.replace(length=jnp.full_like(kv.length, before))
        past = Past(np.zeros(before, int), kv, written=before)
        reading = reader.open(None, [0] * longest, longest, past, drafted=True)
        reading.drafted = before
        jax.block_until_ready((reading.kv, reading.drafting))
        begin = time.perf_counter()
        reader.read_on(reading)
        jax.block_until_ready((reading.hidden, reading.kv, reading.drafting))
        return time.perf_counter() - begin

    return statistics.median([once() for _ in range(1 + CHUNKS)][1:])
