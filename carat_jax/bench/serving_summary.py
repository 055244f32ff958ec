"""What a serving run came to: from each request's times to the figures that servers are known by.

Figures have the names that `vllm bench serve` gives them, and its definitions: TPOT is (latency -
TTFT) / (output tokens - 1) of a request, ITL the time between two arrivals of tokens, of which
one may bring several.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from carat_jax.bench import report


@dataclasses.dataclass(frozen=True)
class Record:
    """A request that got all it asked for; seconds.

    Attributes:
      prompt_tokens, output_tokens: their numbers.
      queue_s: from its submission until a slot was given.
      ttft_s: from its submission to the first token.
      tpot_s: for a token after the first, on average; None without one.
      gaps_s: between arrivals of tokens; none where all were returned at once.
      slot_s: how long it had use for a slot.
      rounds, accepted: of speculation, and the proposals that stood in them.
    """

    prompt_tokens: int
    output_tokens: int
    queue_s: float
    ttft_s: float
    tpot_s: float | None
    gaps_s: tuple[float, ...]
    slot_s: float
    rounds: int = 0
    accepted: int = 0


def summary(
    records: Sequence[Record],
    failed: int,
    duration_s: float,
    slots: int,
    step_floor_s: float | None,
) -> dict[str, Any]:
    """Figures of a run; None where there is nothing to take them from.

    Args:
      records: of the requests that succeeded.
      failed: how many did not.
      duration_s: from the first arrival to the last end.
      slots: requests that were served at once.
      step_floor_s: seconds in which the device reads the weights once; None = unknown.
    """
    read = sum(r.prompt_tokens for r in records)
    written = sum(r.output_tokens for r in records)
    rounds = sum(r.rounds for r in records)
    length = 1 + sum(r.accepted for r in records) / rounds if rounds else None
    figures = {
        "completed": len(records),
        "failed": failed,
        "duration": round(duration_s, 3),
        "total_input_tokens": read,
        "total_output_tokens": written,
        "request_throughput": round(len(records) / duration_s, 3),
        "output_throughput": round(written / duration_s, 2),
        "total_token_throughput": round((read + written) / duration_s, 2),
        **_of("ttft", [r.ttft_s for r in records]),
        **_of("tpot", [r.tpot_s for r in records if r.tpot_s is not None]),
        **_of("itl", [gap for r in records for gap in r.gaps_s]),
        **_of("queue", [r.queue_s for r in records]),
        "acceptance_length": report.rounded(length, 3),
        "slot_occupancy": round(sum(r.slot_s for r in records) / (slots * duration_s), 3),
        "floor_ms": None,
        "tpot_over_floor": None,
    }
    if step_floor_s is not None:
        floor_ms = 1e3 * step_floor_s / (length or 1)
        figures["floor_ms"] = round(floor_ms, 3)
        if figures["mean_tpot_ms"] is not None:
            figures["tpot_over_floor"] = round(figures["mean_tpot_ms"] / floor_ms, 2)
    return figures


STATISTICS = ("Mean", "Median", "P99", "Max")


def _labels(*names: str) -> dict[str, str]:
    """Of what `_of` gives."""
    return {
        f"{statistic.lower()}_{name.lower()}_ms": f"{statistic} {name} (ms)"
        for name in names
        for statistic in STATISTICS
    }


LABELS = {
    "completed": "Successful requests",
    "failed": "Failed requests",
    "duration": "Benchmark duration (s)",
    "total_input_tokens": "Total input tokens",
    "reused_tokens": "  of which reused",
    "total_output_tokens": "Total generated tokens",
    "request_throughput": "Request throughput (req/s)",
    "output_throughput": "Output token throughput (tok/s)",
    "total_token_throughput": "Total token throughput (tok/s)",
    **_labels("TTFT", "TPOT", "ITL"),
    "chunk_ms": "Longest chunk of a prompt (ms)",
    **_labels("queue"),
    "acceptance_length": "Acceptance length",
    "slot_occupancy": "Slot occupancy",
    "peak_gb": "Peak memory (GB)",
    "floor_ms": "TPOT floor, weights once (ms)",
    "tpot_over_floor": "Mean TPOT, × floor",
    "compile_s": "Compiling meanwhile (s)",
}


def table(runs: Sequence[dict[str, Any]]) -> str:
    """A line for each figure, a column for each run, headed by its `run`."""
    width = max(map(len, LABELS.values()))
    rows = [[label.ljust(width), *(run[key] for run in runs)] for key, label in LABELS.items()]
    return report.table(["".ljust(width), *(run["run"] for run in runs)], rows)


def _of(name: str, seconds: Sequence[float]) -> dict[str, float | None]:
    """Mean, median, 99th percentile and maximum, in ms."""
    keys = [f"{statistic.lower()}_{name}_ms" for statistic in STATISTICS]
    if not seconds:
        return dict.fromkeys(keys)
    values = [np.mean(seconds), np.median(seconds), np.percentile(seconds, 99), np.max(seconds)]
    return {key: round(1e3 * float(v), 2) for key, v in zip(keys, values, strict=True)}
