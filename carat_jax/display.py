"""What a notebook shows: small HTML for `_repr_html_`, and bars while something takes long.

The classes say what is worth showing; here is how it looks. Everything is escaped, and nothing but
inline styles is used, which stored notebooks keep.
"""

import contextlib
import html
import math
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from tqdm.auto import tqdm

ACCEPTED, REJECTED, NEUTRAL = "#2e7d32", "#e8a09a", "#5c7cba"  # colours of bars
_EMPTY = "rgba(128, 128, 128, 0.25)"
_CELL = "text-align:left;vertical-align:top;padding:1px 12px 1px 0;border:0"
_PATIENCE = 1.0  # seconds before anything is shown, and between two changes of it


class Html(str):
    """Text that is HTML already."""


def escape(value: Any) -> Html:
    """Any value as HTML text; `Html` stays as it is."""
    return value if isinstance(value, Html) else Html(html.escape(str(value)))


def page(title: str, *parts: Html) -> str:
    """A heading with what belongs under it."""
    inside = "".join(parts)
    return f'<div style="line-height:1.4"><b>{escape(title)}</b>{inside}</div>'


def fields(values: Mapping[str, Any]) -> Html:
    """A table of names and values; what is None is left out."""
    rows = [(name, value) for name, value in values.items() if value is not None]
    return _table(_row("td", [Html(f"<i>{escape(name)}</i>"), value]) for name, value in rows)


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Html:
    """A table with a line of headings."""
    return _table([_row("th", columns), *(_row("td", row) for row in rows)])


def text(value: str) -> Html:
    """Text with its line breaks and spaces."""
    style = "white-space:pre-wrap;margin:4px 0;padding:4px 8px;border-left:3px solid " + _EMPTY
    return Html(f'<pre style="{style}">{escape(value)}</pre>')


def bar(*pieces: tuple[float, str], width: int = 160) -> Html:
    """A bar of coloured pieces, (share of the whole, colour) each; the rest of it is grey."""
    inside = "".join(
        f'<span style="float:left;height:100%;width:{100 * min(max(share, 0.0), 1.0):.1f}%;'
        f'background:{escape(colour)}"></span>'
        for share, colour in pieces
    )
    style = f"display:inline-block;height:0.8em;width:{width}px;background:{_EMPTY}"
    return Html(f'<span style="{style}">{inside}</span>')


def accepted_bar(accepted: int, drafted: int) -> Html:
    """Accepted proposals against rejected ones, with their numbers."""
    share = accepted / max(drafted, 1)
    drawn = bar((share, ACCEPTED), (1 - share if drafted else 0, REJECTED))
    return Html(f"{drawn} {accepted:,} accepted, {drafted - accepted:,} rejected")


def duration(seconds: float | None) -> str | None:
    """Three digits and the unit, "6.77 ms"; None stays None."""
    if seconds is None:
        return None
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def size(count: int) -> str:
    """Bytes with a unit: "6.63 MB"."""
    step = min(max(int(math.log10(max(count, 1))) // 3, 0), 4)
    return f"{count / 1e3**step:.3g} {('B', 'kB', 'MB', 'GB', 'TB')[step]}"


def array(x: Any) -> str:
    """Dtype and shape, "float32[1, 2, 192, 32]", of anything that has both."""
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        return repr(x)
    return f"{jnp.dtype(x.dtype).name}{list(x.shape)}"


def held(tree: Any) -> str:
    """What lies in a pytree, in short: one array as `array`, several as "26 arrays, 442 kB"."""
    leaves = [x for x in jax.tree.leaves(tree) if hasattr(x, "shape") and hasattr(x, "dtype")]
    if len(leaves) < 2:
        return array(leaves[0] if leaves else tree)
    count = sum(math.prod(x.shape) * x.dtype.itemsize for x in leaves)
    return f"{len(leaves)} arrays, {size(count)}"


def values(x: Any) -> list | None:
    """The numbers of an array; None where there are none: a tracer, a shape, a donated array."""
    concrete = isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)
    return x.tolist() if concrete and not x.is_deleted() else None


def in_notebook() -> bool:
    """Whether a Jupyter kernel runs this."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


def progress_bar(total: int, description: str, shown: bool) -> tqdm:
    """A bar of bytes, in a notebook or on a terminal, for what takes more than a second."""
    wanted = False if in_notebook() else None  # None: where standard error is a terminal
    return tqdm(
        total=total,
        desc=description,
        unit="B",
        unit_scale=True,
        delay=_PATIENCE,
        disable=wanted if shown else True,
    )


@contextlib.contextmanager
def waiting(description: str) -> Iterator[None]:
    """In a notebook, a running clock while the block takes more than a second; else nothing.

    What XLA compiles does not tell how far it is, so that the clock is all there is to show.
    """
    if not in_notebook():
        yield
        return
    over = threading.Event()

    def show() -> None:
        if over.wait(_PATIENCE):
            return
        with tqdm(desc=description, bar_format="{desc} {elapsed}", leave=False) as clock:
            while not over.wait(_PATIENCE):
                clock.refresh()

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _row(tag: str, cells: Sequence[Any]) -> str:
    return "".join(f'<{tag} style="{_CELL}">{escape(cell)}</{tag}>' for cell in cells)


def _table(rows: Iterator[str] | Sequence[str]) -> Html:
    lines = "".join(f'<tr style="background:none">{row}</tr>' for row in rows)
    return Html(f'<table style="margin:4px 0;border:0">{lines}</table>')
