"""What a training run leaves in words and numbers: its log, its bar, and the pieces of its plot."""

import dataclasses
import json
import math
import platform
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import tokenizers
from tqdm.auto import tqdm

from carat_jax.training.loop import Point, Trained, TrainingOptions


@contextmanager
def progress_bar() -> Iterator[Callable[[float, Point], None]]:
    """A bar in percent of the time, as what `train` reports to."""
    form = "{l_bar}{bar}| {elapsed}<{remaining}{postfix}"
    with tqdm(total=100, unit="%", bar_format=form) as bar:

        def report(gone: float, point: Point) -> None:
            bar.set_postfix(step=point.step, loss=f"{point.loss:.3f}", refresh=False)
            bar.update(math.floor(100 * gone) - bar.n)

        yield report


def environment() -> dict[str, Any]:
    """Where it ran; nothing that tells of a person or a folder."""
    try:
        git = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True
        )
        commit = git.stdout.strip() or None
    except OSError:
        commit = None
    return {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "tokenizers": tokenizers.__version__,
        "python": platform.python_version(),
        "commit": commit,
    }


def timing(trained: Trained, options: TrainingOptions, wall_seconds: float) -> dict[str, Any]:
    """Steps, tokens, seconds; `wall_seconds` since the start, or since a broken-off run went on."""
    tokens = trained.steps * options.batch * options.window
    return {
        "steps": trained.steps,
        "tokens": tokens,
        "tokens_per_second": round(tokens / trained.seconds),
        "compile_seconds": round(trained.compile_seconds, 1),
        "wall_seconds": round(wall_seconds, 1),
    }


def curve(trained: Trained) -> list[dict[str, Any]]:
    """The points with what was measured at them."""
    return [
        {k: rounded(v) for k, v in dataclasses.asdict(point).items() if v not in (None, {})}
        for point in trained.curve
    ]


def rounded(value: Any) -> Any:
    """Every float of a pytree to four places."""
    return jax.tree.map(lambda x: round(x, 4) if isinstance(x, float) else x, value)


def write_json(file: Path, value: Any) -> None:
    """Indented, with one newline at the end."""
    file.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
