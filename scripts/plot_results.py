"""Draws the plots of the documentation from what is in benchmarks/h200:

docs/measured.svg from decode_*.json, decode steps beside their floors; docs/ablation.svg from
ablation_31b.json, what ring, padding and grouping gain.

.venv/bin/python scripts/plot_results.py
"""

import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from carat_jax.bench import ablation_plots

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "h200"
EARLIER = ("decode_31b_warm.json", "decode_31b_xla.json")  # not of the present decode step
DOCS = ROOT / "docs"


def main() -> None:
    """Writes the plots. The same results give the same bytes."""
    for draw, name in ((decode_steps, "measured.svg"), (ablation, "ablation.svg")):
        # Text stays text: smaller, searchable, in the reader's own font.
        with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
            draw().savefig(DOCS / name, metadata={"Date": None})
        print(f"wrote docs/{name}")


def decode_steps() -> Figure:
    """A bar for each decode step that was measured, and its floor."""
    rows = decode_rows()
    labels = [
        f"{named(row)}, batch {row['batch']}, {row['context']:,} tokens, {row['commit']}"
        for row in rows
    ]
    figure = Figure(figsize=(8, 0.6 * len(rows) + 1.2), layout="constrained")
    axes = figure.add_subplot()
    bars = axes.barh(labels, [row["ms"] for row in rows], color="#2b5c8a", label="measured")
    axes.bar_label(bars, [told(row) for row in rows], padding=4)
    floors = [row["floor_ms"] for row in rows]
    axes.vlines(floors, *([y + d for y in range(len(rows))] for d in (-0.4, 0.4)),
                color="#e67e22", linewidth=3, label="floor: every byte read once")  # fmt: skip
    axes.set(xlabel="ms a decode step", xlim=(0, 1.6 * max(row["ms"] for row in rows)))
    axes.set_title("NVIDIA H200, bfloat16")
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, ncols=2, loc="outside lower center")
    return figure


def ablation() -> Figure:
    """The claims of `carat bench ablation`, one below the other."""
    result = json.loads((RESULTS / "ablation_31b.json").read_text(encoding="utf-8"))
    rows = result["rows"]
    claims = ablation_plots.claims(rows)
    figure = Figure(figsize=(8, 3.4 * len(claims) + 0.3), layout="constrained")
    figure.suptitle(f"{result['environment']['device']}, bfloat16, all through XLA")
    for part, claim in zip(figure.subfigures(len(claims)), claims, strict=True):
        ablation_plots.panel(part, claim, rows, result["config"])
    return figure


def named(row: dict[str, Any]) -> str:
    """The size, and on how many GPUs if on several."""
    devices = row.get("devices", 1)
    return row["config"].upper() + (f", {devices} GPUs" if devices > 1 else "")


def told(row: dict[str, Any]) -> str:
    """What stands beside a bar."""
    return f"{row['ms']:.2f} ms, {row['ms'] / row['floor_ms']:.2f} × floor"


def decode_rows() -> list[dict[str, Any]]:
    """Every row of the present decode step that is not void, with its commit; by size and batch."""
    rows = []
    for file in sorted(set(RESULTS.glob("decode_*.json")) - {RESULTS / name for name in EARLIER}):
        result = json.loads(file.read_text(encoding="utf-8"))
        commit = {"commit": result["environment"]["commit"]}
        rows += [commit | row for row in result["rows"] if not row.get("void")]
    return sorted(rows, key=lambda row: (row["weights_bytes"], row["batch"], row["commit"]))


if __name__ == "__main__":
    main()
