"""Training text that every Python installation has: the sources of its standard library.

The text is the `.py` files of one installation's library, without `site-packages`. It is licensed
under the Python Software Foundation License (PSF-2.0); a few files carry further permissive
notices of their own.
"""

import ast
import fnmatch
import hashlib
import sysconfig
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from carat_jax.chat import ChatFormat

LICENSE = "PSF-2.0 (Python Software Foundation License)"

# Installed packages, tables of data, and files that describe the one machine they are on.
_LEFT_OUT = ("site-packages/*", "dist-packages/*", "_sysconfigdata*", "sitecustomize.py",
             "usercustomize.py", "pydoc_data/*", "encodings/*", "lib2to3/tests/data/*")  # fmt: skip
_HELD_OUT_SHARE = 0.05
_MAX_DEFINITION_CHARS = 4000
_MIN_SUMMARY_CHARS = 20  # of a docstring's first line, to be worth asking for


@dataclass(frozen=True)
class Corpus:
    """Sources by path relative to the library, "/" between folders, in sorted order.

    Attributes:
      training: what a model learns from.
      held_out: what it is measured on. A file is whole on one side.
    """

    training: Mapping[str, str]
    held_out: Mapping[str, str]

    def describe(self) -> dict[str, str | int]:
        """What a log says about the text."""
        return {
            "text": "Python standard library sources",
            "licence": LICENSE,
            "training_files": len(self.training),
            "training_bytes": _num_bytes(self.training),
            "held_out_files": len(self.held_out),
            "held_out_bytes": _num_bytes(self.held_out),
        }


@dataclass(frozen=True)
class Definition:
    """A function or class at the top level of a source.

    Attributes:
      text: its lines, decorators included.
      summary: the first line of its docstring; "" where that says too little or is absent.
    """

    text: str
    summary: str


def standard_library() -> Path:
    """The running interpreter's library folder."""
    return Path(sysconfig.get_paths()["stdlib"])


def read_corpus(folder: Path) -> Corpus:
    """Every Python source of a folder that is UTF-8 and not empty, split by path.

    Raises:
      FileNotFoundError: no such folder, or too few sources in it to train on.
    """
    sources = dict(_sources(folder)) if folder.is_dir() else {}
    corpus = Corpus(
        training={path: text for path, text in sources.items() if not is_held_out(path)},
        held_out={path: text for path, text in sources.items() if is_held_out(path)},
    )
    if not (corpus.training and corpus.held_out):
        raise FileNotFoundError(
            f"{folder} holds {len(sources)} usable Python sources: give a folder like a Python "
            "installation's lib/python3.12, with hundreds of them"
        )
    return corpus


def is_held_out(path: str) -> bool:
    """Whether the file of this relative path is kept from training; about one in twenty is.

    It hangs on nothing but the path, so that it is the same in every Python version.
    """
    return _hash(path) < _HELD_OUT_SHARE


def definitions(source: str) -> list[Definition]:
    """The definitions of one source, but for very long ones; none where it does not parse."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of invalid escapes, in tests of just that
            body = ast.parse(source).body
    except (SyntaxError, ValueError):
        return []
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    found = [_definition(source.split("\n"), node) for node in body if isinstance(node, kinds)]
    return [d for d in found if len(d.text) <= _MAX_DEFINITION_CHARS]


def documents(sources: Iterable[str], chat_format: ChatFormat) -> list[str]:
    """What a model learns from, shuffled: whole files, definitions alone, and chats.

    A chat asks for what the docstring of a definition says and is answered by the definition.
    Documents spell out their own `<bos>` and `<eos>`.
    """
    texts: list[str] = []
    for source in sources:
        found = definitions(source)
        texts.append(f"<bos>{source}<eos>")
        texts += [f"<bos>{definition.text}<eos>" for definition in found]
        texts += [
            f"{_chat(definition, chat_format)}<eos>" for definition in found if definition.summary
        ]
    return shuffled(texts)


def shuffled(texts: Iterable[str]) -> list[str]:
    """Without duplicates, in an order that hangs on nothing but the texts."""
    return sorted(set(texts), key=_hash)


def _sources(folder: Path) -> Iterator[tuple[str, str]]:
    for file in sorted(folder.rglob("*.py")):
        path = file.relative_to(folder).as_posix()
        if any(fnmatch.fnmatchcase(path, pattern) for pattern in _LEFT_OUT):
            continue
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # the library tests other encodings with such files
        if text.strip():
            yield path, text


def _definition(lines: list[str], node: ast.stmt) -> Definition:
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    summary = (ast.get_docstring(node) or "").split("\n")[0].strip()
    return Definition(
        text="\n".join(lines[first - 1 : node.end_lineno]) + "\n",
        summary=summary if len(summary) >= _MIN_SUMMARY_CHARS else "",
    )


def _chat(definition: Definition, chat_format: ChatFormat) -> str:
    """As `Gemma.chat` puts it: the prompt, `<bos>` included, then the reply and its end."""
    prompt = chat_format.render([{"role": "user", "content": definition.summary}])
    return prompt + definition.text.rstrip() + "<turn|>\n"


def _hash(text: str) -> float:
    """Uniform in [0, 1)."""
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def _num_bytes(sources: Mapping[str, str]) -> int:
    return sum(len(text.encode()) for text in sources.values())
