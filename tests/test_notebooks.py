"""The notebooks, each run in a fresh kernel and held against the outputs stored in it."""

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "notebooks").glob("*.ipynb"))
LONG = ("04", "05", "06")  # near a minute each: `make test` leaves them out, CI runs them
MOST_BYTES = 1_500_000  # of all of them: a clone carries every version

spec = importlib.util.spec_from_file_location("run", ROOT / "scripts" / "run_notebooks.py")
run = importlib.util.module_from_spec(spec)
spec.loader.exec_module(run)

Shown = list[tuple[str, str]]  # of a cell: what kind each output is, and its text


@pytest.fixture(autouse=True)
def compiled_once(monkeypatch, pytestconfig):
    """The notebooks run many of the same programs: compiled for one, they are there for all."""
    folder = pytestconfig.cache.mkdir("notebooks-xla")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(folder))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")


def read(file: Path) -> NotebookNode:
    return nbformat.read(file, as_version=4)


def code(notebook: NotebookNode) -> Iterator[tuple[NotebookNode, bool]]:
    """Cells of code, and whether their text changes from run to run: times, rounded sums."""
    for cell in notebook.cells:
        if cell.cell_type == "code":
            yield cell, "varies" in cell.metadata.get("tags", ())


def shown(cell: NotebookNode) -> Shown:
    """Plots and HTML count as having been there; of everything else the text does."""
    found = []
    for output in cell.outputs:
        if output.output_type == "stream":
            found.append((output.name, output.text))
        else:
            drawn = "image/png" in output.data
            text = "" if drawn else output.data.get("text/plain", "")
            found.append((" ".join(sorted(output.data)), text))
    return found


def differences(stored: NotebookNode, executed: NotebookNode) -> list[str]:
    """A sentence for each cell that shows something else than what is stored."""
    found = []
    for (old, varies), (new, _) in zip(code(stored), code(executed), strict=True):
        was, now = shown(old), shown(new)
        if varies:
            was, now = ([kind for kind, _ in one] for one in (was, now))
        if was != now:
            found.append(f"cell {old.id} has stored {was}, and shows {now}")
    return found


def test_the_notebooks_are_there_and_small():
    assert [file.name[:2] for file in FILES] == ["01", "02", "03", "04", "05", "06", "07"]
    assert sum(file.stat().st_size for file in FILES) < MOST_BYTES


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_notebook_opens_with_its_title_and_the_same_one_install_cell(file):
    notebook = read(file)
    nbformat.validate(notebook)
    title, install = notebook.cells[:2]
    assert title.source.startswith("# ")
    assert install.source == read(FILES[0]).cells[1].source
    assert sum("%pip" in cell.source for cell in notebook.cells) == 1
    assert any(cell.outputs for cell, _ in code(notebook))
    assert not any(kind == "stderr" for cell, _ in code(notebook) for kind, _ in shown(cell))


@pytest.mark.parametrize(
    "file",
    [pytest.param(f, marks=pytest.mark.slow if f.name[:2] in LONG else ()) for f in FILES],
    ids=lambda file: file.stem,
)
def test_a_notebook_runs_and_shows_what_is_stored(file):
    assert differences(read(file), run.execute(file)) == []


def small(folder: Path, source: str, **output) -> Path:
    cell = nbformat.v4.new_code_cell(source, id="only")
    if output:
        cell.outputs = [nbformat.v4.new_output("stream", **output)]
    file = folder / "small.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), file)
    return file


def test_what_the_comparison_finds(tmp_path):
    file = small(tmp_path, "print(1 + 1)", name="stdout", text="3\n")
    executed = run.execute(file)
    assert differences(read(file), executed) == [
        "cell only has stored [('stdout', '3\\n')], and shows [('stdout', '2\\n')]"
    ]
    assert differences(executed, executed) == []
    silent = read(small(tmp_path, "print(1 + 1)"))
    assert "has stored []" in differences(silent, executed)[0]
    for notebook in (silent, executed):
        notebook.cells[0].metadata.tags = ["varies"]
    assert "has stored []" in differences(silent, executed)[0]
    other = executed.copy()
    other.cells = [nbformat.v4.new_code_cell("", outputs=[
        nbformat.v4.new_output("stream", name="stdout", text="another\n")])]  # fmt: skip
    assert differences(executed, other) == []


def test_a_cell_that_fails_is_an_error(tmp_path):
    file = small(tmp_path, "1 / 0")
    with pytest.raises(CellExecutionError, match=re.escape("ZeroDivisionError")):
        run.execute(file)
