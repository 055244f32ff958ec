"""Runs notebooks from top to bottom, each in a fresh kernel, and stores what they print and draw:

    .venv/bin/python scripts/run_notebooks.py [FILE ...]

Without a FILE all of `notebooks/`. A notebook that fails is left as it was.
"""

import argparse
import os
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = ROOT / "notebooks"
TIMEOUT = 300  # seconds a cell may take
WIDGET = "application/vnd.jupyter.widget-view+json"


def main(arguments: list[str] | None = None) -> None:
    """The command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description="Run notebooks and store their outputs.")
    parser.add_argument("file", nargs="*", type=Path, help="a notebook (default: all)")
    for file in parser.parse_args(arguments).file or sorted(NOTEBOOKS.glob("*.ipynb")):
        begin = time.perf_counter()
        notebook = execute(file)
        nbformat.write(notebook, file)
        kilobytes = file.stat().st_size / 1e3
        print(f"{file.name}: {time.perf_counter() - begin:.0f} s, {kilobytes:.0f} kB", flush=True)


def execute(file: Path) -> NotebookNode:
    """The notebook with its outputs: run on the CPU, in its folder, with this checkout's modules.

    Raises:
      CellExecutionError: a cell fails.
    """
    notebook = nbformat.read(file, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=TIMEOUT,
        kernel_name="python3",
        resources={"metadata": {"path": str(file.parent)}},
        store_widget_state=False,
        record_timing=False,
    )
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    client.execute(env=os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"})
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = _lasting(cell.outputs)
    notebook.metadata.pop("widgets", None)
    notebook.metadata.language_info = {"name": "python"}
    return notebook


def _lasting(outputs: list[NotebookNode]) -> list[NotebookNode]:
    """Without progress bars, which mean nothing afterwards; text of one stream in one piece."""
    kept: list[NotebookNode] = []
    for output in outputs:
        if WIDGET in output.get("data", {}):
            continue
        last = kept[-1] if kept else None
        if last and output.output_type == last.output_type == "stream" and last.name == output.name:
            last.text += output.text
        else:
            kept.append(output)
    return kept


if __name__ == "__main__":
    sys.exit(main())
