"""How often a drafter's guesses stand, on text that neither it nor its target learned from:

    python -m carat_jax.training.acceptance --drafter tiny ngram FOLDER --out DIR

Prompts are beginnings of held-out files of the corpus (`carat_jax.training.corpus`): code from the
first definition on, and prose, the words of docstrings. DIR gets `acceptance.json` and
`acceptance.png`.
"""

import argparse
import ast
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from carat_jax.gemma import Gemma, load, load_drafter
from carat_jax.generation import Stats
from carat_jax.speculative import Drafter
from carat_jax.training import log as logs
from carat_jax.training.corpus import definitions, read_corpus, standard_library

MIN_CHARS = 400  # of a source's code or prose, to be continued


def main(arguments: list[str] | None = None) -> None:
    """The command line; see the module's docstring."""
    parser = _parser()
    given = parser.parse_args(arguments)
    try:
        gemma = load(given.target, dtype=given.dtype)
        drafters = {name: load_drafter(name, gemma) for name in given.drafter}
        held_out = read_corpus(given.corpus).held_out
        prompts = {
            kind: [text[: given.prompt_chars] for text in texts[: given.prompts]]
            for kind, texts in (("code", code(held_out)), ("prose", prose(held_out)))
        }
        rows = measure(gemma, drafters, prompts, given.num_proposals, given.max_new_tokens)
    except (ValueError, FileNotFoundError) as error:
        parser.error(str(error))
    print(table(rows))
    given.out.mkdir(parents=True, exist_ok=True)
    options = {k: v for k, v in vars(given).items() if k not in ("out", "corpus")}
    result = {"environment": logs.environment(), "options": options, "rows": rows}
    logs.write_json(given.out / "acceptance.json", logs.rounded(result))
    _plot(given.out / "acceptance.png", rows)


def code(sources: Mapping[str, str]) -> list[str]:
    """Of each source that has enough, what stands from its first long definition on."""
    found = [[d.text for d in definitions(s) if len(d.text) >= MIN_CHARS] for s in sources.values()]
    return [texts[0] for texts in found if texts]


def prose(sources: Mapping[str, str]) -> list[str]:
    """Of each source that has one that is long enough, the first such docstring."""
    found = [[d for d in _docstrings(s) if len(d) >= MIN_CHARS] for s in sources.values()]
    return [texts[0] for texts in found if texts]


def measure(
    gemma: Gemma,
    drafters: Mapping[str, Drafter],
    prompts: Mapping[str, Sequence[str]],
    num_proposals: int,
    max_new_tokens: int,
) -> list[dict[str, Any]]:
    """A row for each drafter and kind of prompt, of greedy continuations of fixed length.

    Returns:
      drafter, kind (of drafter: assistant, ngram, model), prompts (their kind), count, tokens,
      acceptance_length (tokens a round) and acceptance: for each of K places in a round, in what
      share of the rounds the guess stood.
    """
    rows = []
    for name, drafter in drafters.items():
        for kind, texts in prompts.items():
            results = gemma.generate(
                list(texts),
                drafter=drafter,
                num_proposals=num_proposals,
                max_new_tokens=max_new_tokens,
                temperature=0.0,
                stop_token_ids=(),
            )
            rows.append(
                {
                    "drafter": name,
                    "kind": type(drafter).__name__.lower(),
                    "prompts": kind,
                    "count": len(results),
                    "tokens": sum(len(r.tokens) for r in results),
                    **_together([r.stats for r in results], num_proposals),
                }
            )
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows in columns."""
    K = max(len(row["acceptance"]) for row in rows)
    lines = [f"{'kind':10} {'drafter':16} {'prompts':8} {'tokens a round':>14} " + "".join(
        f"{i + 1:>7}" for i in range(K))]  # fmt: skip
    for row in rows:
        shares = "".join(f"{share:7.3f}" for share in row["acceptance"])
        name = f"{row['kind']:10} {row['drafter'][-16:]:16}"
        lines.append(f"{name} {row['prompts']:8} {row['acceptance_length']:14.2f} {shares}")
    return "\n".join(lines)


def _together(stats: Sequence[Stats], num_proposals: int) -> dict[str, Any]:
    rounds = np.array([sum(s.rounds.values()) for s in stats])
    stood = np.array([np.array(s.per_position) * n for s, n in zip(stats, rounds, strict=True)])
    accepted = sum(s.accepted for s in stats)
    return {
        "acceptance_length": float(1 + accepted / rounds.sum()),
        "acceptance": (stood.sum(0) / rounds.sum()).tolist()[:num_proposals],
    }


def _docstrings(source: str) -> list[str]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of invalid escapes, in tests of just that
            tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return []
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    texts = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds)]
    return [text for text in texts if text]


def _plot(file: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    from matplotlib.figure import Figure  # slow to import, and needed once

    kinds = list(dict.fromkeys(row["prompts"] for row in rows))
    figure = Figure(figsize=(4.5 * len(kinds), 4), layout="constrained")
    for axes, kind in zip(figure.subplots(1, len(kinds), squeeze=False)[0], kinds, strict=True):
        for row in rows:
            if row["prompts"] == kind:
                shares = row["acceptance"]
                name = " ".join(dict.fromkeys((row["kind"], row["drafter"])))  # "ngram" but once
                label = f"{name}: {row['acceptance_length']:.2f} tokens a round"
                axes.plot(range(1, len(shares) + 1), shares, marker="o", label=label)
        axes.set(title=kind, xlabel="place in the round", ylabel="share accepted", ylim=(0, 1.02))
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(file, dpi=120)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m carat_jax.training.acceptance",
        description="Measure how often the guesses of drafters stand, on held-out code and prose.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--target", default="tiny", help="bundled model, folder or hub id")
    parser.add_argument("--drafter", nargs="+", default=["tiny", "ngram"],
                        help="what load_drafter takes")  # fmt: skip
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="float32",
                        help="to compute in")  # fmt: skip
    parser.add_argument("--out", type=Path, required=True, help="folder for table and plot")
    parser.add_argument("--corpus", type=Path, default=standard_library(),
                        help="folder of .py files, like lib/python3.12")  # fmt: skip
    parser.add_argument("--num-proposals", type=int, default=4, help="guesses of a round")
    parser.add_argument("--prompts", type=int, default=32, help="of each kind, at most")
    parser.add_argument("--prompt-chars", type=int, default=200, help="length of a prompt")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="of each continuation")
    return parser


if __name__ == "__main__":
    main()
