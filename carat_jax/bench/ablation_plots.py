"""Draws what `carat bench ablation` measured; matplotlib is loaded only here, and only then."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def prepare(folder: Path) -> None:
    """Makes the folder and finds matplotlib, so that neither fails after minutes of measuring.

    Raises:
      ValueError: matplotlib is not installed.
      OSError: the folder cannot be made.
    """
    _figure()
    folder.mkdir(parents=True, exist_ok=True)


def draw(rows: Sequence[Row], config: str, folder: Path) -> list[str]:
    """Writes ablation_SIZE_CLAIM.png for each claim among the rows, void rows left out.

    Returns:
      The paths.
    """
    written = []
    for claim in claims(rows):
        figure = _figure()(figsize=(8, 4.5), dpi=150, layout="constrained")
        panel(figure, claim, rows, config)
        file = folder / f"ablation_{config}_{claim}.png"
        figure.savefig(file)
        written.append(str(file))
    return written


def claims(rows: Sequence[Row]) -> list[str]:
    """The claims of which something can be drawn: those with a row that is not void."""
    return list(dict.fromkeys(row["claim"] for row in rows if not row["void"]))


def panel(figure: Any, claim: str, rows: Sequence[Row], config: str) -> None:
    """Draws one claim into an empty figure or subfigure, which needs the constrained layout.

    Args:
      figure: of matplotlib.
      claim: one of `claims(rows)`.
      rows: of all claims; void rows are left out, and the title says how many.
      config: the size that was measured, for the title.
    """
    measured = [row for row in rows if row["claim"] == claim]
    valid = [row for row in measured if not row["void"]]
    axes = figure.add_subplot()
    title, plot = PLOTS[claim]
    void = len(measured) - len(valid)
    axes.set_title(f"{config.upper()}: {title}" + (f" ({void} void left out)" if void else ""))
    axes.set_ylabel("attention of a layer [µs]")
    plot(axes, valid)
    axes.margins(y=0.12)
    axes.set_ylim(bottom=0)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.legend(frameon=False, ncols=4, loc="outside lower center")


def _bars(axes: Any, rows: Sequence[Row]) -> None:
    """Bars for each variant, grouped by the number of new tokens."""
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    counts = sorted({row["tokens"] for row in rows})
    width = 0.8 / len(variants)
    for i, variant in enumerate(variants):
        own = [row for row in rows if row["variant"] == variant]
        x = [counts.index(row["tokens"]) + (i - (len(variants) - 1) / 2) * width for row in own]
        bars = axes.bar(x, [row["us"] for row in own], width * 0.92, label=variant)
        axes.bar_label(bars, fmt="{:.1f}", padding=2)
    axes.set_xticks(range(len(counts)), [_tokens(count, rows) for count in counts])
    for i, count in enumerate(counts):
        floor = next(row["floor_us"] for row in rows if row["tokens"] == count)
        _floor(axes, [i - 0.45, i + 0.45], [floor, floor], first=i == 0)


def _sweep(axes: Any, rows: Sequence[Row]) -> None:
    """A line for each variant over the number of keys."""
    for variant in dict.fromkeys(row["variant"] for row in rows):
        own = sorted((r["keys"], r["us"]) for r in rows if r["variant"] == variant)
        axes.plot(*zip(*own, strict=True), marker=".", markersize=4, linewidth=1.2, label=variant)
    floor = sorted({(row["keys"], row["floor_us"]) for row in rows})
    _floor(axes, *map(list, zip(*floor, strict=True)), first=True)
    low, high = floor[0][0], floor[-1][0]
    for multiple in range(-(-low // 64) * 64, high + 1, 64):
        axes.axvline(multiple, color="0.85", linewidth=1, zorder=0)
    axes.set_xlabel("keys (grey lines: multiples of 64)")


def _floor(axes: Any, x: list[float], y: list[float | None], first: bool) -> None:
    if None not in y:
        label = "floor: keys and values read once" if first else None
        axes.plot(x, y, color="black", linestyle="--", linewidth=1.2, label=label)


def _tokens(count: int, rows: Sequence[Row]) -> str:
    keys = max(row["keys"] for row in rows)
    return f"{'decode' if count == 1 else 'verify'}, T = {count}, context {keys:,}"


PLOTS: dict[str, tuple[str, Callable[[Any, Sequence[Row]], None]]] = {
    "ring": ("sliding window in a ring, or gathered from pages", _bars),
    "padding": ("exactly as many keys as there are, or padded and masked", _sweep),
    "grouping": ("query heads of a group together, or a pass for each", _bars),
}


def _figure() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError(
            "plots need matplotlib, which is not installed: pip install matplotlib, or give "
            "--no-png"
        ) from None
    return Figure
