"""Imports go down only: the floors of the source tree, held against the imports in its files."""

from __future__ import annotations

import ast
import graphlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("carat_jax", "pallas_kernels")

# From the top. A package's name stands for all its modules, except carat_jax: that is __init__.py.
FLOORS = (
    ("carat_jax",),
    ("carat_jax.cli",),
    ("carat_jax.bench",),
    ("carat_jax.gemma", "carat_jax.engine", "carat_jax.training"),
    ("carat_jax.batch_run",),
    ("carat_jax.speculative",),
    ("carat_jax.generate", "carat_jax.memory"),
    (
        "carat_jax.model",
        "carat_jax.params",
        "carat_jax.attention",
        "carat_jax.feed_forward",
        "carat_jax.layers",
        "carat_jax.checkpoint",
    ),
    ("carat_jax.kv_state", "carat_jax.rope", "carat_jax.sharding"),
    (
        "pallas_kernels",
        "carat_jax.sampling",
        "carat_jax.config",
        "carat_jax.config_json",
        "carat_jax.options",
        "carat_jax.prompts",
        "carat_jax.generation",
        "carat_jax.device_loops",
        "carat_jax.display",
        "carat_jax.chat",
        "carat_jax.chat_template",
        "carat_jax.tokenizer",
        "carat_jax.compilation_cache",
    ),
)


def test_the_tree_keeps_its_floors():
    assert find_modules(ROOT), "no module found: the test looks in the wrong place"
    assert find_violations(ROOT) == []


@pytest.mark.parametrize(
    ("importer", "statement", "complaint"),
    [
        ("carat_jax/rope.py", "import carat_jax.model", "above"),
        ("carat_jax/rope.py", "from carat_jax.model import Block", "above"),
        ("carat_jax/rope.py", "from carat_jax import model", "above"),
        ("carat_jax/rope.py", "from .model import Block", "above"),
        ("carat_jax/rope.py", "from . import model", "above"),
        ("carat_jax/rope.py", "def late():\n    from carat_jax import model", "above"),
        ("carat_jax/rope.py", "import carat_jax", "above"),
        ("carat_jax/rope.py", "from carat_jax import load", "above"),
        ("carat_jax/bench/decode.py", "from ..cli import main", "above"),
        ("carat_jax/engine/slots.py", "from carat_jax.bench import decode", "only the CLI"),
        ("carat_jax/rope.py", "from carat_jax import kv_state", "circle"),
        ("pallas_kernels/dispatch.py", "from carat_jax.config import x", "nothing of carat_jax"),
        ("carat_jax/helpers.py", "import jax", "on no floor"),
    ],
)
def test_a_breach_is_found(tmp_path, importer, statement, complaint):
    write_sound_tree(tmp_path)
    (tmp_path / importer).write_text(statement + "\n")
    violations = find_violations(tmp_path)
    assert len(violations) == 1
    assert complaint in violations[0]


def test_a_sound_tree_passes(tmp_path):
    write_sound_tree(tmp_path)
    assert find_violations(tmp_path) == []


def write_sound_tree(root: Path) -> None:
    files = {
        "carat_jax/__init__.py": "from carat_jax.gemma import Gemma",
        "carat_jax/cli.py": "from carat_jax.bench import decode\nfrom carat_jax import gemma",
        "carat_jax/gemma.py": "from .model import Block\nfrom .config import GemmaConfig",
        "carat_jax/engine/__init__.py": "from .slots import Slots",
        "carat_jax/engine/slots.py": "from ..gemma import Gemma",
        "carat_jax/bench/__init__.py": "",
        "carat_jax/bench/decode.py": "from carat_jax.model import Block",
        "carat_jax/model.py": "from carat_jax import kv_state\nimport pallas_kernels.dispatch",
        "carat_jax/kv_state.py": "import jax\nfrom carat_jax.rope import rotate",
        "carat_jax/rope.py": "import jax.numpy as jnp",
        "carat_jax/config.py": "import json",
        "pallas_kernels/__init__.py": "",
        "pallas_kernels/dispatch.py": "from . import shapes",
        "pallas_kernels/shapes.py": "",
    }
    for name, source in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source + "\n")


def find_violations(root: Path) -> list[str]:
    """Returns a sentence for every import under `root` that the floors do not allow."""
    modules = find_modules(root)
    imports = {name: find_imports(name, path, modules) for name, path in modules.items()}
    found = [
        f"{name} is on no floor: give it one in FLOORS"
        for name in modules
        if floor_of(name) is None
    ]
    for importer, imported in sorted((a, b) for a, names in imports.items() for b in names):
        complaint = judge(importer, imported)
        if complaint:
            found.append(f"{importer} imports {imported}: {complaint}")
    if not found:  # a circle that goes up has been told of already
        try:
            graphlib.TopologicalSorter(imports).prepare()
        except graphlib.CycleError as error:
            found.append("a circle of imports: " + " → ".join(reversed(error.args[1])))
    return found


def judge(importer: str, imported: str) -> str | None:
    if is_within(importer, "pallas_kernels"):
        if is_within(imported, "carat_jax"):
            return "pallas_kernels knows nothing of carat_jax"
        return None
    if is_within(imported, "carat_jax.bench") and not (
        is_within(importer, "carat_jax.bench") or importer == "carat_jax.cli"
    ):
        return "only the CLI imports the benchmarks"
    own, other = floor_of(importer), floor_of(imported)
    if own is not None and other is not None and other < own:
        return "it stands above"
    return None


def floor_of(module: str) -> int | None:
    """Returns the module's floor, counted from the top, or None."""
    for number, names in enumerate(FLOORS):
        for name in names:
            if module == name or (name != "carat_jax" and is_within(module, name)):
                return number
    return None


def is_within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def find_modules(root: Path) -> dict[str, Path]:
    """Maps the dotted name of each module of the project to its file."""
    modules = {}
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return modules


def find_imports(name: str, path: Path, modules: dict[str, Path]) -> set[str]:
    """Returns the project's modules that a file imports, at its top or inside a function."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), filename=str(path))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            source = node.module or ""
            if node.level:
                parents = package.split(".")
                parents = parents[: len(parents) - node.level + 1]
                source = ".".join([*parents, source] if source else parents)
            for alias in node.names:
                submodule = f"{source}.{alias.name}"
                found.add(submodule if submodule in modules else source)
    return {module for module in found if module.split(".")[0] in PACKAGES}
