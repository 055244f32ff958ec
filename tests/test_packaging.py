"""The set-up scripts against made-up machines, and the package's metadata against the tree."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]
SETUPTOOLS = PYPROJECT["tool"]["setuptools"]
TOOLS = ("bash", "cat", "chmod", "cksum", "dirname", "grep", "mkdir", "rm", "sort")


class Machine:
    """A checkout on a machine whose PATH holds a few tools and the programs that a test adds."""

    def __init__(self, folder: Path):
        self.checkout = folder / "a checkout"
        self.bin = folder / "bin"
        self.home = folder / "home"
        self.log = folder / "pip.log"
        tools = folder / "tools"
        for made in (self.checkout, self.bin, self.home, tools):
            made.mkdir(parents=True)
        for tool in TOOLS:
            (tools / tool).symlink_to(shutil.which(tool))
        shutil.copytree(ROOT / "scripts", self.checkout / "scripts")
        for name in ("pyproject.toml", "constraints.txt"):
            (self.checkout / name).write_text(f"# {name}\n")
        self.path = f"{self.bin}:{tools}"

    def run(self, script: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [shutil.which("bash"), f"scripts/{script}"],
            cwd=self.checkout,
            env={"PATH": self.path, "HOME": str(self.home)},
            capture_output=True,
            text=True,
            timeout=60,
        )

    def add(self, path: Path | str, script: str) -> Path:
        """Writes an executable shell script; a bare name goes on the PATH."""
        path = self.bin / path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return path

    def add_python(self, path: Path | str, version: tuple[int, ...], lacks: str = "") -> Path:
        """A real interpreter under another name, version and set of standard modules."""
        path = self.bin / path
        disguise = (
            f"import sys; sys.version_info = {version}; sys.executable = {str(path)!r}; "
            f"sys.modules.update(dict.fromkeys({lacks.split()}));"
            "exec(sys.argv[2])"
        )
        return self.add(path, f"""exec "{sys.executable}" -c "{disguise}" "$@" """)

    def add_pyenv_shim(self, name: str) -> Path:
        return self.add(name, f'echo "pyenv: {name}: command not found" >&2; exit 127')

    def add_venv_maker(self, version: str = "Python 3.12.1") -> None:
        """A python3.12 that makes environments whose pip only notes its arguments in `log`."""
        self.add(
            "python3.12",
            rf"""
            case $1 in
              -V) echo "{version}" ;;
              -c) echo "$0" ;;
              -m) rm -rf .venv; mkdir -p .venv/bin
                  echo "venv $*" >>"{self.log}"
                  echo "#!$PWD/.venv/bin/python" >.venv/bin/pip
                  cat "{self.home}/venv_python" >.venv/bin/python
                  chmod +x .venv/bin/python ;;
            esac""",
        )
        self.add(
            self.home / "venv_python",
            rf"""
            case $1 in
              -VV) echo "{version}" ;;
              -m) echo "$*" >>"{self.log}"; test ! -e "{self.home}/offline" ;;
            esac""",
        )

    def logged(self) -> list[str]:
        """The environments made and pip's runs since the last call."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        return [line.split()[0] if line.startswith("venv") else line for line in lines]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def find_python(machine: Machine) -> Path:
    found = machine.run("find_python.sh")
    assert found.returncode == 0, found.stderr
    return Path(found.stdout.removesuffix("\n"))


def test_finder_prefers_the_newest_supported_name(machine):
    machine.add_python("python3", (3, 14, 0))
    machine.add_python("python3.12", (3, 12, 1))
    newest = machine.add_python("python3.13", (3, 13, 0))
    assert find_python(machine) == newest


def test_finder_skips_what_cannot_make_the_environment(machine):
    machine.add_pyenv_shim("python3.13")
    machine.add_python("python3.12", (3, 12, 1), lacks="ensurepip")
    machine.add_python("python3", (3, 11, 7))
    selected = machine.home / ".pyenv/versions/3.12.10/bin/python3"
    machine.add_python(selected, (3, 12, 10))
    assert find_python(machine) == selected


def test_finder_looks_behind_a_broken_shim_of_the_same_name(machine, tmp_path):
    machine.add_pyenv_shim("python3.12")
    behind = machine.add_python(tmp_path / "usr/python3.12", (3, 12, 4))
    machine.path += f":{behind.parent}"
    assert find_python(machine) == behind


def test_finder_takes_pyenvs_highest_version(machine):
    for version in ("3.12.9", "3.13.2", "3.13.10", "3.14.0"):
        numbers = tuple(map(int, version.split(".")))
        machine.add_python(machine.home / f".pyenv/versions/{version}/bin/python3", numbers)
    assert find_python(machine) == machine.home / ".pyenv/versions/3.13.10/bin/python3"


def test_finder_does_not_take_the_environment_itself(machine):
    inside = machine.add_python(machine.checkout / ".venv/bin/python3", (3, 13, 0))
    outside = machine.add_python("python3", (3, 12, 1))
    machine.path = f"{inside.parent}:{machine.path}"
    assert find_python(machine) == outside


def test_finder_with_nothing_to_find_says_in_one_line_what_to_do(machine):
    machine.add_pyenv_shim("python3.13")
    machine.add_python("python3", (3, 11, 7))
    for script in ("find_python.sh", "setup.sh"):
        failed = machine.run(script)
        assert failed.returncode == 1
        assert failed.stdout == ""
        assert failed.stderr.count("\n") == 1
        assert "needs Python 3.12 or newer" in failed.stderr
        assert "pyenv install 3.12" in failed.stderr


PIP_INSTALL = "-m pip install --constraint constraints.txt --editable .[{}]"


def set_up(machine: Machine) -> list[str]:
    done = machine.run("setup.sh")
    assert done.returncode == 0, done.stderr
    return machine.logged()


def test_setup_installs_once(machine):
    machine.add_venv_maker()
    assert set_up(machine) == ["venv", PIP_INSTALL.format("test")]
    assert set_up(machine) == []


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_setup_installs_again_when_a_requirement_changes(machine, name):
    machine.add_venv_maker()
    set_up(machine)
    (machine.checkout / name).write_text("# changed\n")
    assert set_up(machine) == [PIP_INSTALL.format("test")]
    assert set_up(machine) == []


def test_setup_installs_again_when_the_python_changes(machine):
    machine.add_venv_maker()
    set_up(machine)
    python = machine.checkout / ".venv/bin/python"
    python.write_text(python.read_text().replace("3.12.1", "3.12.2"))
    assert set_up(machine) == [PIP_INSTALL.format("test")]


def test_setup_starts_over_after_a_broken_off_install(machine):
    machine.add_venv_maker()
    (machine.home / "offline").touch()
    assert machine.run("setup.sh").returncode != 0
    machine.logged()
    (machine.home / "offline").unlink()
    assert set_up(machine) == ["venv", PIP_INSTALL.format("test")]


def test_setup_repairs_a_half_made_environment(machine):
    machine.add_venv_maker()
    machine.add(machine.checkout / ".venv/bin/python", "exit 0")  # without pip
    assert set_up(machine) == ["venv", PIP_INSTALL.format("test")]
    (machine.checkout / ".venv/bin/python").unlink()
    assert set_up(machine) == ["venv", PIP_INSTALL.format("test")]


def test_setup_starts_over_in_a_moved_checkout(machine, tmp_path):
    machine.add_venv_maker()
    set_up(machine)
    machine.checkout = machine.checkout.rename(tmp_path / "moved")
    assert set_up(machine) == ["venv", PIP_INSTALL.format("test")]


@pytest.mark.parametrize(
    ("nvidia_smi", "extras"),
    [
        ("echo '| Driver Version: 570.86.15    CUDA Version: 12.8     |'", "test,cuda12"),
        ("echo '| Driver Version: 580.65.06    CUDA Version: 13.0     |'", "test,cuda13"),
        ("echo '| KMD Version: 610.12    CUDA UMD Version: 13.3     |'", "test,cuda13"),
        ("echo '| Driver Version: 535.54    CUDA Version: N/A     |'", "test,cuda12"),
        ("echo 'No devices were found'; exit 6", "test"),
    ],
)
def test_setup_installs_the_build_for_this_machine(machine, nvidia_smi, extras):
    machine.add_venv_maker()
    set_up(machine)
    machine.add("nvidia-smi", nvidia_smi)
    expected = [] if extras == "test" else [PIP_INSTALL.format(extras)]
    assert set_up(machine) == expected


def read_pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = {}
    for line in lines:
        if not line.startswith("#"):
            name, version = re.fullmatch(r"([a-z0-9-]+)==([0-9][0-9a-z.]*)", line).groups()
            pins[name] = version
    return pins


def test_every_package_of_the_test_environment_is_pinned_within_its_requirement():
    pins = read_pins()
    extras = PROJECT["optional-dependencies"]
    requirements = [*PROJECT["dependencies"], *extras["train"], *extras["test"]]
    waiting = [Requirement(text) for text in requirements]
    seen = set()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name == PROJECT["name"]:
            continue
        assert name in pins, f"constraints.txt lacks {name}"
        assert requirement.specifier.contains(pins[name]), f"{requirement} against {pins[name]}"
        for extra in {"", *requirement.extras}:
            if (name, extra) not in seen:
                seen.add((name, extra))
                waiting += [
                    needed
                    for needed in map(Requirement, importlib.metadata.requires(name) or [])
                    if needed.marker is None or needed.marker.evaluate({"extra": extra})
                ]


def test_the_selected_python_is_supported():
    selected = (ROOT / ".python-version").read_text().strip()
    assert SpecifierSet(PROJECT["requires-python"]).contains(selected)


def test_a_wheel_leaves_no_file_behind():
    modules, data, present = set(), set(), set()
    for package in ("carat_jax", "pallas_kernels"):
        files = {path for path in (ROOT / package).rglob("*") if path.is_file()}
        present |= {path for path in files if path.parent.name != "__pycache__"}
        modules |= {path for path in files if (path.parent / "__init__.py").exists()}
        for pattern in SETUPTOOLS["package-data"].get(package, []):
            data |= set((ROOT / package).glob(pattern))
    shipped = {path for path in modules if path.suffix == ".py"} | data
    shipped -= {path for path in shipped if path.name.startswith(".")}  # setuptools skips these
    assert sorted(str(path.relative_to(ROOT)) for path in present - shipped) == []


def test_the_console_script_exists():
    module, _, function = PROJECT["scripts"]["carat"].partition(":")
    assert callable(getattr(importlib.import_module(module), function))


def test_importing_the_package_stays_light():
    heavy = ("matplotlib", "optax", "torch", "transformers")
    code = (
        "import sys, carat_jax; carat_jax.load;"
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    imported = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert imported.returncode == 0, imported.stderr
    assert imported.stdout == "[]\n"
