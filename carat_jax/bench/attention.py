"""Time of the attention ops at published shapes, against the time to read their keys and values.

A call is one layer's. Its floor: every live key and value read once at the device's measured
bandwidth; a prefill chunk is bound by arithmetic instead and gets its TFLOP/s. All of an op's
implementations run on the same random inputs, and each result is held against float64.
"""

import argparse
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from carat_jax.bench import peers, report, timing
from carat_jax.bench.cases import OPS, Buffer, Case, cases
from carat_jax.config import PRESETS, GemmaConfig
from pallas_kernels import Unsupported

PREFILL_CALLS = 20  # in one dispatch, where a call takes milliseconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `carat bench attention`."""

    def several(name: str, default: Sequence[Any], told: str, **options: Any) -> None:
        shown = " ".join(map(str, default)) or "all"
        text = f"{told} (default {shown})"
        parser.add_argument(name, nargs="+", default=list(default), help=text, **options)

    names = _implementations()
    sizes, ops = ", ".join(PRESETS), ", ".join(OPS)
    several("--config", ["31b"], f"of {sizes}", choices=list(PRESETS), metavar="SIZE")
    several("--op", list(OPS), f"of {ops}", choices=list(OPS), metavar="OP")
    contexts = [1024, 6005, 32_768, 131_072]
    told = "positions that end with the newest token; a window sees the last of them"
    several("--context", contexts, told, type=int, metavar="N")
    several("--tokens", [1, 4, 8], "new tokens of a ring or global call", type=int, metavar="T")
    several("--batch", [1], "sequences in a call", type=int, metavar="B")
    told = f"of {', '.join(names)}"
    several("--implementation", [], told, choices=names, metavar="NAME")
    parser.add_argument(
        "--chunk",
        type=int,
        default=2048,
        metavar="T",
        help="new tokens of a prefill call, at most the whole context (default 2048)",
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measures every combination; see `table` for the fields.

    "skipped" says what was not measured, and why: implementations that refuse a shape, peers
    that are not installed.
    """
    wanted = list(_cases(args))
    chosen = args.implementation or _implementations()
    absent = {name: peers.why_not(name) for name in peers.PEERS if name in chosen}
    rows: list[dict[str, Any]] = []
    skipped = [{"implementation": name, "why": why} for name, why in absent.items() if why]
    kept = _Kept()
    for config, case in wanted:
        report.say(
            f"{config} {case.op}: {case.context:,} positions, T {case.tokens}, B {case.batch}"
        )
        names = [name for name in OPS[case.op].implementations if name in chosen]
        refusals = {name: why for name in names if (why := _refusal(case, name))}
        skipped += [_label(config, case, name) | {"why": why} for name, why in refusals.items()]
        names = [name for name in names if name not in refusals]
        rows += _measure(config, case, names, kept)
        plain = dataclasses.replace(case, compact=False)  # the only form that the peers have
        rows += _measure(config, plain, [n for n, why in absent.items() if not why], kept)
    return {
        "benchmark": "attention",
        "environment": report.environment(),
        "rows": rows,
        "skipped": skipped,
    }


def table(result: dict[str, Any]) -> str:
    """One line for each measurement, then one for each reason that something was skipped."""
    columns = {
        "op": "op",
        "config": "config",
        "heads": "heads",
        "cache": "cache",
        "batch": "batch",
        "context": "context",
        "tokens": "T",
        "implementation": "implementation",
        "us": "µs",
        "floor_us": "floor µs",
        "ratio": "× floor",
        "gb_per_s": "GB/s",
        "tflop_per_s": "TFLOP/s",
        "error": "rel. error",
        "void": "void",
    }
    lines = [
        report.table(
            list(columns.values()), [[row[key] for key in columns] for row in result["rows"]]
        )
    ]
    reasons: dict[tuple[str, str], int] = {}
    for skip in result["skipped"]:
        key = skip["implementation"], skip["why"]
        reasons[key] = reasons.get(key, 0) + ("op" in skip)
    for (name, why), count in reasons.items():
        lines.append(f"skipped {name}{f', {count} ×' if count else ''}: {why}")
    return "\n".join(lines)


def _implementations() -> list[str]:
    """Names in any op, then the peers."""
    own = [name for op in OPS.values() for name in op.implementations]
    return list(dict.fromkeys([*own, *peers.PEERS]))


def _cases(args: argparse.Namespace) -> Iterator[tuple[str, Case]]:
    """(size, case), those with the same keys and values one after the other.

    Raises:
      ValueError: numbers that an op, a model or the device's memory cannot take.
    """
    for name in args.config:
        config = GemmaConfig.preset(name)
        for op in args.op:
            for batch in args.batch:
                for context in args.context:
                    counts = [min(args.chunk, context)] if op == "prefill" else args.tokens
                    for tokens in counts:
                        for case in cases(config, op, context, tokens=tokens, batch=batch):
                            _copies(case)
                            yield name, case


def _copies(case: Case) -> int:
    """Buffers that rotate: as many as the model has layers, and enough to outgrow the caches."""
    layers = 1 if case.op == "prefill" else case.layers
    return timing.copies(case.buffer_bytes, layers)


def _refusal(case: Case, implementation: str) -> str | None:
    """Why an implementation cannot take this case."""
    queries, buffer = jax.eval_shape(lambda: (case.queries(), case.buffer(0)))
    try:
        jax.eval_shape(case.step(implementation), queries[0], buffer, queries[1])
    except Unsupported as refusal:
        return str(refusal)
    return None


class _Kept:
    """What the next case may use again: buffers, compiled chains."""

    def __init__(self) -> None:
        self._key: Any = None
        self._buffers: list[Buffer] = []
        self._chains: dict[Any, timing.Chain] = {}

    def buffers(self, case: Case) -> list[Buffer]:
        """As many as rotate; those of the last case where this one takes the same."""
        key = jax.eval_shape(lambda: case.buffer(0)), _copies(case)
        if key != self._key:
            self._buffers = []  # frees the old ones first
            self._buffers = [case.buffer(seed) for seed in range(key[1])]
            self._key = key
        return self._buffers

    def chain(self, case: Case, implementation: str) -> timing.Chain:
        """Of all cases that differ in shapes alone: the context is read on the device."""
        key = case.op, case.spec.window, case.compact, implementation
        if key not in self._chains:
            calls = PREFILL_CALLS if case.op == "prefill" else timing.CALLS
            self._chains[key] = timing.Chain(case.step(implementation), calls)
        return self._chains[key]


def _measure(
    config: str, case: Case, names: Sequence[str], kept: _Kept
) -> Iterator[dict[str, Any]]:
    """A row for each implementation."""
    if not names:
        return
    buffers = kept.buffers(case)
    q, shared = case.queries()
    ends = [buffers[0], buffers[-1]]
    expected = [case.expected(q, shared, buffer) for buffer in ends]
    for name in names:
        if name in peers.PEERS:
            outputs, times = peers.PEERS[name](case, q, buffers)
        else:
            chain = kept.chain(case, name)
            outputs = chain.outputs(q, ends, shared)
            times = chain.time(q, buffers, shared)
        label = _label(config, case, name) | {"copies": len(buffers)}
        yield label | _row(case, times) | case.judge(outputs, expected)


def _label(config: str, case: Case, implementation: str) -> dict[str, Any]:
    s = case.spec
    return {
        "op": case.op,
        "config": config,
        "heads": f"{s.num_heads}/{s.num_kv_heads}×{s.head_dim}",
        "window": s.window,
        "cache": "compact" if case.compact else "plain",
        "batch": case.batch,
        "context": case.context,
        "tokens": case.tokens,
        "implementation": implementation,
    }


def _row(case: Case, times: timing.Times) -> dict[str, Any]:
    prefill = case.op == "prefill"
    return times.row(None if prefill else case.bytes) | {
        "gb_per_s": None if prefill else round(case.bytes / times.median / 1e9),
        "tflop_per_s": round(case.flops / times.median / 1e12, 1) if prefill else None,
        "bytes": case.bytes,
        "flops": case.flops,
    }
