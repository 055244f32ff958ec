"""What each of three ideas gains by itself: ring, padded key counts, grouped query heads.

All variants are the same two matrix products through XLA, in bfloat16, and differ in one thing:

* ring: keys and values of a sliding window as they lie in a ring, or gathered through a page
  table, pages of 64 and of 16 positions.
* padding: a global layer whose key axis is exactly as long as the context, or padded to a
  multiple of 64 and masked; a sweep over the context.
* grouping: all query heads of a KV head as rows of one product, or a pass over the keys for each
  query head of a group (over all KV heads at once).
"""

import argparse
import dataclasses
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from carat_jax.bench import ablation_plots, random_model, report, timing
from carat_jax.bench.cases import Buffer, Case, cases
from carat_jax.config import GemmaConfig
from carat_jax.kv_state import round_up
from pallas_kernels.grouping import attend, from_rows, mask_rows, product, to_rows

PAGES = (64, 16)  # positions a page
TOKENS = (1, 4)  # decode, and verify with three proposals
Row = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `carat bench ablation`."""
    random_model.add_config(parser)
    parser.add_argument(
        "--claim",
        nargs="+",
        choices=list(CLAIMS),
        default=list(CLAIMS),
        metavar="CLAIM",
        help=f"of {', '.join(CLAIMS)} (default all)",
    )
    parser.add_argument(
        "--context",
        type=int,
        default=6005,
        metavar="N",
        help="positions that end with the newest token, for ring and grouping (default 6005)",
    )
    parser.add_argument(
        "--keys",
        nargs=3,
        type=int,
        default=[5900, 6100, 5],
        metavar=("FIRST", "LAST", "STEP"),
        help="key counts of the padding sweep; multiples of 64 and their neighbours are added "
        "(default 5900 6100 5)",
    )
    plots = parser.add_mutually_exclusive_group()
    plots.add_argument(
        "--png",
        type=Path,
        metavar="DIR",
        help="draw each claim into DIR (default: the folder of --json; needs matplotlib)",
    )
    plots.add_argument("--no-png", action="store_true", help="draw nothing")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measures the claims; "plots" lists the files drawn.

    Raises:
      ValueError: numbers that the model does not take; no matplotlib for the plots.
    """
    config = GemmaConfig.preset(args.config)
    first, last, step = args.keys
    if step < 1 or first > last:
        raise ValueError(f"--keys {first} {last} {step}: FIRST <= LAST and STEP >= 1 are needed")
    sweep = _key_counts(first, last, step)
    counts = {claim: sweep if claim == "padding" else [args.context] for claim in args.claim}
    for context in sorted({n for few in counts.values() for n in (few[0], few[-1])}):
        _case(config, "global", context, max(TOKENS))  # refuses before anything is measured
    folder = _plot_folder(args)
    if folder:
        ablation_plots.prepare(folder)
    rows: list[Row] = []
    for claim in args.claim:
        for row in CLAIMS[claim](config, counts[claim]):
            report.say(f"{claim}: {row}")
            rows.append({"claim": claim} | row)
    return {
        "benchmark": "ablation",
        "environment": report.environment(),
        "config": args.config,
        "rows": rows,
        "plots": ablation_plots.draw(rows, args.config, folder) if folder else [],
    }


def table(result: dict[str, Any]) -> str:
    """One line for each variant: of a sweep the median, and the slowest of its key counts."""
    columns = [
        "claim",
        "variant",
        "T",
        "keys",
        "µs",
        "slowest µs",
        "floor µs",
        "rel. error",
        "void",
    ]
    groups: dict[tuple[str, str, int], list[Row]] = {}
    for row in result["rows"]:
        groups.setdefault((row["claim"], row["variant"], row["tokens"]), []).append(row)
    lines = []
    for (claim, variant, tokens), rows in groups.items():
        keys = sorted({row["keys"] for row in rows})
        floors = [row["floor_us"] for row in rows if row["floor_us"] is not None]
        errors = [row["error"] for row in rows]
        lines.append(
            [
                claim,
                variant,
                tokens,
                f"{keys[0]:,}" + (f"–{keys[-1]:,}" if len(keys) > 1 else ""),
                round(statistics.median(row["us"] for row in rows), 2),
                max(row["us"] for row in rows),
                round(statistics.median(floors), 2) if floors else None,
                None if None in errors else max(errors),
                any(row["void"] for row in rows),
            ]
        )
    drawn = [f"wrote {file}" for file in result["plots"]]
    return "\n".join([report.table(columns, lines), *drawn])


def _plot_folder(args: argparse.Namespace) -> Path | None:
    """Where plots go: --png, else beside what --json writes; None = nowhere."""
    if args.png or args.no_png:
        return args.png
    return args.json and args.json.parent


def _key_counts(first: int, last: int, step: int) -> list[int]:
    """The sweep, with every multiple of 64 in it, one key less and one more."""
    multiples = range(round_up(first), last + 1, 64)
    near = {n for multiple in multiples for n in (multiple - 1, multiple, multiple + 1)}
    return sorted({*range(first, last + 1, step), *(n for n in near if first <= n <= last)})


# --- The claims: (config, key counts) -> rows ----------------------------------------------------


def _ring(config: GemmaConfig, counts: list[int]) -> Iterator[Row]:
    for context in counts:
        for tokens in TOKENS:
            case = _case(config, "ring", context, tokens)
            q, shared = case.queries()
            rings = _buffers(case)
            window, expected = case.spec.window, [case.expected(q, shared, rings[0])]

            def as_it_lies(q: jax.Array, ring: Buffer, shared: Buffer) -> jax.Array:
                newest = shared["length"] + q.shape[1] - 1
                slots = jnp.arange(ring["v"].shape[2])
                held = newest - (newest - slots) % len(slots)
                return _attend(q, ring["k"], ring["v"], shared["length"], held, window)  # noqa: B023

            chain = timing.Chain(as_it_lies)
            yield _row("ring", chain, case, q, rings, shared, expected)
            for page in PAGES:
                pools, where = _paged(case, rings, page)
                chain = timing.Chain(_gathered(page, window))
                yield _row(f"pages of {page}", chain, case, q, pools, shared | where, expected)


def _padding(config: GemmaConfig, counts: list[int]) -> Iterator[Row]:
    tokens = max(TOKENS)
    longest = _buffers(_case(config, "global", counts[-1], tokens))
    chain = timing.Chain(_grouped)
    for context in counts:
        case = _case(config, "global", context, tokens)
        q, shared = case.queries()
        expected = [case.expected(q, shared, longest[0])]
        for variant, size in (("exact", context), ("padded to 64", case.capacity)):
            cut = [{name: x[:, :, :size] for name, x in buffer.items()} for buffer in longest]
            yield _row(variant, chain, case, q, cut, shared, expected)


def _grouping(config: GemmaConfig, counts: list[int]) -> Iterator[Row]:
    for context in counts:
        for tokens in TOKENS:
            case = _case(config, "global", context, tokens)
            q, shared = case.queries()
            buffers = _buffers(case)
            expected = [case.expected(q, shared, buffers[0])]
            for variant, step in (("grouped", _grouped), ("per query head", _per_query_head)):
                yield _row(variant, timing.Chain(step), case, q, buffers, shared, expected)


CLAIMS: dict[str, Callable[[GemmaConfig, list[int]], Iterator[Row]]] = {
    "ring": _ring,
    "padding": _padding,
    "grouping": _grouping,
}


def _case(config: GemmaConfig, op: str, context: int, tokens: int) -> Case:
    """One row of a plain cache."""
    return dataclasses.replace(cases(config, op, context, tokens=tokens)[0], compact=False)


def _buffers(case: Case) -> list[Buffer]:
    return [case.buffer(seed) for seed in range(timing.copies(case.buffer_bytes))]


def _row(
    variant: str,
    chain: timing.Chain,
    case: Case,
    q: jax.Array,
    buffers: list[Buffer],
    shared: Buffer,
    expected: list[np.ndarray],
) -> Row:
    outputs = chain.outputs(q, buffers[:1], shared)
    times = chain.time(q, buffers, shared)
    label = {"variant": variant, "tokens": case.tokens, "keys": case.context}
    return label | times.row(case.bytes) | case.judge(outputs, expected)


# --- The variants, as steps of a chain -----------------------------------------------------------


def _attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    length: jax.Array,
    held: jax.Array,
    window: int | None = None,
) -> jax.Array:
    """Two grouped products. q [1, T, N, H]; k, v [1, K, S, H]; held int [S], their positions."""
    T, N, K = q.shape[1], q.shape[2], v.shape[1]
    age = (length[:, None] + jnp.arange(T))[:, :, None] - held  # [1, T, S]
    seen = (age >= 0) & (held >= 0)
    if window is not None:
        seen &= age < window
    scores = product("bkmh,bksh->bkms", to_rows(q, K), k)
    return from_rows(attend(scores, mask_rows(seen, N // K), v), T)


def _gathered(page: int, window: int) -> timing.Step:
    def step(q: jax.Array, pool: Buffer, shared: Buffer) -> jax.Array:
        k, v = (
            pool[name][shared["table"]].reshape(1, -1, *pool[name].shape[2:]).swapaxes(1, 2)
            for name in ("k", "v")
        )
        held = shared["first"] + jnp.arange(v.shape[2])
        return _attend(q, k, v, shared["length"], held, window)

    return step


def _paged(case: Case, rings: list[Buffer], page: int) -> tuple[list[Buffer], Buffer]:
    """The rings' contents in pools [2 n, page, K, H], and where to find them.

    The table names the n pages that hold a window, in the order of their positions; in the pool
    they are scattered.
    """
    first = case.positions[0] // page
    n = (case.context - 1) // page + 1 - first
    slots = case.slots(first * page + np.arange(n * page))
    table = np.random.default_rng(0).permutation(2 * n)[:n]

    @jax.jit
    def pool(x: jax.Array) -> jax.Array:
        rows = x[0][:, slots].swapaxes(0, 1)
        rows = rows.reshape(n, page, *rows.shape[1:])
        return jnp.zeros((2 * n, *rows.shape[1:]), x.dtype).at[table].set(rows)

    where = {"table": jnp.asarray(table, jnp.int32), "first": jnp.int32(first * page)}
    return [{name: pool(x) for name, x in ring.items()} for ring in rings], where


def _grouped(q: jax.Array, buffer: Buffer, shared: Buffer) -> jax.Array:
    k, v = buffer["k"], buffer["v"]
    return _attend(q, k, v, shared["length"], jnp.arange(v.shape[2]))


def _per_query_head(q: jax.Array, buffer: Buffer, shared: Buffer) -> jax.Array:
    """A pass for each query head of a group; the barrier keeps the passes from being merged."""
    k, v = buffer["k"], buffer["v"]
    B, T, N, H = q.shape
    K = v.shape[1]
    held = jnp.arange(v.shape[2])
    outs: list[jax.Array] = []
    for member in jnp.moveaxis(q.reshape(B, T, K, N // K, H), 3, 0):
        member, k, v, outs = lax.optimization_barrier((member, k, v, outs))
        outs.append(_attend(member, k, v, shared["length"], held))
    return jnp.stack(outs, axis=3).reshape(B, T, N, H)
