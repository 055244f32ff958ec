"""Pages of the documentation from the notebooks, with their stored outputs: a hook of MkDocs."""

import base64
from collections.abc import Iterator
from pathlib import Path

import nbformat
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from nbformat import NotebookNode

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds `notebooks/NAME.md` and the images in it, for each notebook."""
    for notebook in sorted(NOTEBOOKS.glob("*.ipynb")):
        images: dict[str, bytes] = {}
        content = page(nbformat.read(notebook, as_version=4), notebook.stem, images)
        files.append(File.generated(config, f"notebooks/{notebook.stem}.md", content=content))
        for name, image in images.items():
            files.append(File.generated(config, f"notebooks/{name}", content=image))
    return files


def page(notebook: NotebookNode, name: str, images: dict[str, bytes]) -> str:
    """The notebook as Markdown.

    Args:
      notebook: with outputs.
      name: of its file, without the suffix.
      images: gets the images that the page refers to, by file name.
    """
    parts = []
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
        elif "%pip" not in cell.source:  # the page does not run, so it installs nothing
            parts.append(_fenced(cell.source, "python"))
            for part in _shown(cell, name, images):
                parts.append(part)
    title, *rest = parts
    where = f"*This page is `notebooks/{name}.ipynb` as it last ran.*"
    return "\n\n".join([title.replace("\n", f"\n\n{where}\n", 1), *rest]) + "\n"


def _shown(cell: NotebookNode, name: str, images: dict[str, bytes]) -> Iterator[str]:
    for number, output in enumerate(cell.outputs):
        data = output.get("data", {})
        if output.output_type == "stream":
            yield _fenced(output.text, "text")
        elif "image/png" in data:
            file = f"{name}-{cell.id}-{number}.png"
            images[file] = base64.b64decode(data["image/png"])
            yield f"![drawn by the cell above]({file})"
        elif "text/html" in data:
            yield data["text/html"]
        else:
            yield _fenced(data["text/plain"], "text")


def _fenced(text: str, language: str) -> str:
    return f"````{language}\n{text.rstrip()}\n````"
