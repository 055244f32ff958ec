"""README and documentation: their examples run, their commands are real, the site builds."""

import ast
import contextlib
import importlib
import importlib.util
import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config

import carat_jax as carat
from carat_jax import cli, compilation_cache, memory
from carat_jax.config import PRESETS
from carat_jax.training import acceptance, drafter, tiny

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAMES = [page.relative_to(ROOT).as_posix() for page in PAGES]

# Blocks of Python that do not run here, by page and first line.
NOT_RUN = {
    ("docs/howto/load.md", 'gemma = carat.load("google/gemma-4-31B-it", max_context=32768)'):
        "a gated checkpoint of 63 GB",
    ("docs/howto/meshes.md", "import carat_jax as carat"): "the same, and four GPUs",
}  # fmt: skip

# Commands that do not run here, by how they begin; their arguments are parsed.
COMMANDS_NOT_RUN = {
    "carat bench": "made for a GPU; tests/test_bench*.py run them in small",
    "carat generate 'The ring buffer'": "a gated checkpoint",
    "carat chat": "a gated checkpoint, and somebody to talk to",
    "python -m carat_jax.training": "minutes of training; tests/test_training*.py run it in small",
    "bash scripts/measure.sh": "tests/test_measure.py runs it, with a command that only listens",
    "python scripts/plot_results.py": "test_the_plots_show_every_result runs its parts",
    "make": "sets up an environment; tests/test_packaging.py runs that",
}


def blocks(page: Path, language: str) -> list[str]:
    found = re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.S | re.M)
    return [block.strip() for block in found]


def commands() -> Iterator[tuple[str, list[str]]]:
    """Each command, with the page it is on."""
    for page, name in zip(PAGES, NAMES, strict=True):
        for block in blocks(page, "bash"):
            yield from ((name, shlex.split(line)) for line in block.split("\n"))


@pytest.fixture(autouse=True)
def no_files_in_the_users_cache(monkeypatch):
    monkeypatch.setattr(compilation_cache, "enable", lambda: None)


# --- Python --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", [n for n, p in zip(NAMES, PAGES, strict=True) if blocks(p, "python")]
)
def test_the_examples_of_a_page_run(name, capsys):
    run = [b for b in blocks(ROOT / name, "python") if (name, b.split("\n")[0]) not in NOT_RUN]
    names: dict[str, Any] = {}
    exec(compile("\n".join(run), name, "exec"), names)
    if name == "docs/drafters.md":
        plain, fast = names["plain"], names["fast"]
        assert fast.tokens == plain.tokens
        assert fast.stats.accepted > 0
    if name == "docs/howto/speculate.md":
        assert names["out"].stats.acceptance_length > 1.6  # the bundled drafter, after training


def test_examples_that_do_not_run_are_there_and_name_what_exists():
    for (name, first), reason in NOT_RUN.items():
        assert reason
        (block,) = [b for b in blocks(ROOT / name, "python") if b.split("\n")[0] == first]
        for call in ast.walk(ast.parse(block)):
            if isinstance(call, ast.Call):
                function = eval(ast.unparse(call.func), {"carat": carat})
                known = importlib.import_module("inspect").signature(function)
                known.bind(*call.args, **{k.arg: k.value for k in call.keywords})


# --- Commands ------------------------------------------------------------------------------------


def not_run(words: list[str]) -> str | None:
    line = shlex.join(words)
    return next((why for start, why in COMMANDS_NOT_RUN.items() if line.startswith(start)), None)


def parser_of(words: list[str]) -> tuple[Any, list[str]]:
    if words[0] == "carat":
        return cli._parser(), words[1:]
    modules = {m.__name__: m for m in (acceptance, drafter, tiny)}
    assert words[:2] == ["python", "-m"], words
    return modules[words[2]]._parser(), words[3:]


def test_every_command_is_one():
    checked = 0
    for name, words in commands():
        if words[0] == "make":
            assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.M)
        elif words[1].startswith("scripts/"):
            assert (ROOT / words[1]).is_file()
        else:
            parser, arguments = parser_of(words)
            with contextlib.redirect_stderr(sys.stdout):
                try:
                    parser.parse_args(arguments)
                except SystemExit:
                    pytest.fail(f"{name}: {shlex.join(words)}")
        checked += 1
    assert checked > 20


def test_commands_that_need_nothing_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    wanted = [words for _, words in commands() if not_run(words) is None]
    for words in dict.fromkeys(map(tuple, wanted)):
        assert cli.main(words[1:]) == 0, words
    assert len(wanted) > 6
    assert "def " in capsys.readouterr().out


def test_what_is_left_out_is_there():
    lines = [shlex.join(words) for _, words in commands()]
    for start in COMMANDS_NOT_RUN:
        assert any(line.startswith(start) for line in lines), start


# --- Numbers and the site ------------------------------------------------------------------------


def scripts(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def results(pattern: str) -> list[dict]:
    files = sorted((ROOT / "benchmarks" / "h200").glob(pattern))
    return [row for file in files for row in json.loads(file.read_text())["rows"]]


@pytest.mark.parametrize("name", ["README.md", "docs/how_it_works.md"])
def test_each_row_of_a_table_of_decode_steps_was_measured(name):
    """All numbers of a row, rounded as they stand there."""
    pattern = r"^\| (E2B|E4B|12B|26B-A4B|31B)(?:, (\d) GPUs)? \|(.*)\|$"
    rows = re.findall(pattern, (ROOT / name).read_text(), re.M)
    assert len(rows) >= 5
    for size, devices, cells in rows:
        numbers = re.findall(r"(?<![\w-])[\d,]+(?:\.\d+)?(?= \|| *$)", cells.partition("`")[0])
        given = [text.replace(",", "") for text in numbers]
        batch, context, ms, floor, ratio, rate, tokens = given
        stated = {"ms": ms, "floor_ms": floor, "ratio": ratio, "gb_per_s": rate,
                  "tokens_per_s": tokens}  # fmt: skip
        measured = [r for r in results("decode_*.json") if r["config"] == size.lower()]
        assert any(
            (row["batch"], row["context"]) == (int(batch), int(context))
            and row.get("devices", 1) == int(devices or 1)
            and all(abs(row[k] - float(v)) <= half_a_digit(v) for k, v in stated.items())
            for row in measured
        ), (size, stated)


def half_a_digit(text: str) -> float:
    return 0.5001 * 10.0 ** -len(text.partition(".")[2])


def test_what_others_take_and_the_step_beside_it_are_as_stored():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    table = text.partition("| | ms a step |\n")[2].partition("\n\n")[0]
    told = [float(ms) for ms in re.findall(r"\| ([\d.]+) \|$", table, re.M)]
    own, _ = results("decode_31b.json")
    assert told == [round(own["ms"], 1), *(row["ms"] for row in results("peers_31b.json"))]


def test_the_sums_over_devices_are_as_stored():
    page = (ROOT / "docs" / "howto" / "meshes.md").read_text(encoding="utf-8")
    told = [
        tuple(map(float, row)) for row in re.findall(r"\| ([\d.]+) \| ([\d.]+) \|$", page, re.M)
    ]
    stored = json.loads((ROOT / "benchmarks/h200/all_reduce_2gpu.json").read_text())
    rows = stored["rows"] + stored["first_form"]["rows"]
    measured = [(r["bare_us"], r["with_product_us"] - r["product_us"]) for r in rows]
    assert len(told) == 7
    for bare, added in told:
        assert any(abs(bare - b) <= 0.0501 and abs(added - a) <= 0.0501 for b, a in measured), bare


def test_the_table_of_serving_was_measured():
    page = (ROOT / "docs" / "how_it_works.md").read_text(encoding="utf-8")
    table = page.partition("| slots | requests | output tokens/s |")[2].partition("\n\n")[0]
    stated = re.findall(
        r"^\| (\d+)[^|]*\|[^|]*\| (\S+) \| (\S+) \| (\S+), (\S+) \| (\S+) \|", table, re.M
    )
    files = ("3", "8", "6k", "3_plain")
    fields = ("slots", "output_throughput", "mean_tpot_ms", "mean_itl_ms", "max_itl_ms",
              "slot_occupancy")  # fmt: skip
    for name, cells in zip(files, stated, strict=True):
        (row,) = results(f"serving_31b_{name}.json")
        for field, cell in zip(fields, cells, strict=True):
            text = cell.replace(",", "")
            assert abs(row[field] - float(text)) <= half_a_digit(text), (name, field)


def test_the_tables_of_changed_attention_and_of_loops_were_measured():
    page = (ROOT / "docs" / "kernels.md").read_text(encoding="utf-8")
    stored = json.loads((ROOT / "benchmarks/h200/kernels_31b.json").read_text())
    stated = re.findall(r"^\| (ring|global)[^|]*, (before|after) \| (.*) \|$", page, re.M)
    told = [(stored["attention_merge"][when][op], row) for op, when, row in stated]
    loops = stored["loops"]["runs"]
    table = page.partition("| 31B cut to twelve layers")[2].partition("\n\n")[0]
    stated = re.findall(r"^\| [^|]*[a-z`] \| ([\d.]+ \| [\d.]+) \|$", table, re.M)
    kernels = stored["loops"]["kernels_us"]
    rows = [[kernels["step"] / 1000, kernels["round"] / 1000]]
    rows += [[run["step_ms"], run["round_ms"]] for run in loops[:3]]
    told += zip(rows, stated, strict=True)
    assert len(told) == 8
    for values, row in told:
        for value, text in zip(values, row.split(" | "), strict=True):
            assert abs(value - float(text)) <= half_a_digit(text), row


def test_the_table_of_attention_was_measured():
    page = (ROOT / "docs" / "kernels.md").read_text(encoding="utf-8")
    pattern = r"^\| (ring|global)[^|]*, ([\d,]+) (?:keys|positions) \| ([^|]+)\|(.*)\|[^|]*\|$"
    stated = re.findall(pattern, page, re.M)
    assert len(stated) == 5
    rows = results("attention_31b.json")
    assert not any(row["void"] for row in rows)
    for op, context, floor, cells in stated:
        found = {
            row["tokens"]: row
            for row in rows
            if (row["op"], row["context"]) == (op, int(context.replace(",", "")))
        }
        assert abs(found[1]["floor_us"] - float(floor)) <= half_a_digit(floor.strip())
        for tokens, cell in zip((1, 4, 5), cells.split("|"), strict=True):
            us = found[tokens]["us"]
            assert abs(us - float(cell)) <= half_a_digit(cell.strip()), (op, context, tokens)


def reached() -> Iterator[tuple[str, str, float, float | None]]:
    """(file, row of the table, what was measured in its unit, floor if there is one)."""
    attention = "attention_31b.json"
    rows = {(r["op"], r["context"], r["tokens"]): r for r in results(attention)}
    for op, context, where in (
        ("ring", 6005, "ring"),
        ("global", 6005, "6,005 keys"),
        ("global", 32_768, "32,768 keys"),
        ("global", 131_072, "131,072 keys"),
    ):
        for tokens in (1, 4) if context == 6005 else (4,):
            row = rows[op, context, tokens]
            yield attention, f"attention, {where}, T = {tokens}", row["us"], row["floor_us"]
    (step,) = results("speculative_31b.json")
    assert (step["batch"], step["context"], step["proposals"]) == (1, 6005, 4)
    read = memory.step_bytes(PRESETS["31b"], 1, 6005)
    floor = 1e3 * read.floor_s(memory.READ_BANDWIDTH["NVIDIA H200"])
    yield "speculative_31b.json", "a step of 31B behind 6,005 tokens", step["step_ms"], floor
    (step,) = results("speculative_31b_3.json")
    assert (step["batch"], step["context"], step["proposals"]) == (1, 6005, 3)
    more = 100 * (step["verify_ms"] / step["step_ms"] - 1)
    label = "a verify pass of four positions over a step of 31B"
    yield "speculative_31b_3.json", label, more, None
    prefill, *_ = results("prefill_31b_cold.json")
    assert prefill["prompt"] == 8192
    yield "prefill_31b_cold.json", "a prompt of 8,192 tokens, 31B", prefill["ttft_s"], None
    for size in ("12b", "26b-a4b", "e4b", "e2b"):
        (row,) = results(f"decode_{size}.json")
        assert (row["batch"], row["context"]) == (1, 2048)
        label = f"a step of {size.upper()} behind 2,048 tokens"
        yield f"decode_{size}.json", label, row["ms"], row["floor_ms"]


def test_the_table_of_what_was_reached_was_measured():
    """And a row says "reached" where that is no more than the aim, and there alone."""
    page = (ROOT / "docs" / "kernels.md").read_text(encoding="utf-8")
    table = page.partition("\n| | floor | aim | measured | commit |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\|" + r" ([^|]+) \|" * 6, table, re.M)
    stated = {label: cells for label, *cells in rows}
    for file, label, *values in reached():
        floor, aim, measured, commit, why = stated.pop(label)
        stored = json.loads((ROOT / "benchmarks" / "h200" / file).read_text())
        assert commit == stored["environment"]["commit"], label
        assert (floor == "–") == (values[1] is None), label
        for value, cell in zip(values, (measured, floor), strict=True):
            if value is None:
                continue
            number, unit = cell.lstrip("+ ").split()
            assert abs(value - float(number)) <= half_a_digit(number), (label, value)
            assert unit == aim.split()[-1], label
        assert why.startswith("reached") == (values[0] <= float(aim.lstrip("+ ").split()[0])), label
    assert [cells[2:4] for cells in stated.values()] == [["–", "–"]] * 2  # prefill attention


KERNELS_OF_A_STEP = {  # rows of the table: the kernel's name in profiles
    "products with weights (floor 13.1)": "multiply_tiles",
    "products that take the norm before them": "norm_and_multiply",
    "attention": "attention",
    "residual sums and norms": "add_and_norm",
    "GELU, and the sums of its product's pieces": "add_up_and_activate",
    "norms of heads, RoPE, writes of the cache": "norm_turn_store",
    "all kernels": None,
}


def test_the_table_of_a_steps_kernels_was_measured():
    page = (ROOT / "docs" / "kernels.md").read_text(encoding="utf-8")
    table = page.partition("\n| | T = 1 | T = 5 |\n|---|---|---|\n")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| (.*) \| (\S+) \| (\S+) \|$", table, re.M)
    assert [row[0] for row in rows] == list(KERNELS_OF_A_STEP)
    stored = json.loads((ROOT / "benchmarks/h200/kernels_31b.json").read_text())["whole_step"]
    for column, step in enumerate(stored[:2], 1):
        us = {kernel["kernel"]: kernel["us"] for kernel in step["kernels"]}
        us[None] = step["busy_us"]
        for row in rows:
            cell, kernel = row[column], KERNELS_OF_A_STEP[row[0]]
            if cell == "–":
                assert kernel not in us
            else:
                assert abs(us[kernel] / 1000 - float(cell)) <= half_a_digit(cell), row


def test_the_table_of_what_is_read_once_was_measured():
    page = (ROOT / "docs" / "kernels.md").read_text(encoding="utf-8")
    stored = json.loads((ROOT / "benchmarks/h200/kernels_31b.json").read_text())["read_once"]
    stated = re.findall(r"^\| (?:as before|evicted first) \| (\S+) \| (\S+) \|$", page, re.M)
    assert len(stated) == 2
    for run, cells in zip(stored["runs"], stated, strict=False):
        for field, cell in zip(("step_ms", "round_ms"), cells, strict=True):
            assert abs(run[field] - float(cell)) <= half_a_digit(cell), run["variant"]


def test_a_part_of_a_result_that_the_page_of_kernels_names_is_stored():
    page = (ROOT / "docs" / "kernels.md").read_text(encoding="utf-8")
    named = re.findall(r"`([\w-]+\.json)`,\s+`(\w+)`", page)
    assert named
    for file, part in named:
        assert part in json.loads((ROOT / "benchmarks" / "h200" / file).read_text()), (file, part)


OPS = [
    path
    for path in sorted((ROOT / "pallas_kernels").glob("*/__init__.py"))
    if "\nIMPLEMENTATIONS" in path.read_text()
]


@pytest.mark.parametrize("path", OPS, ids=lambda path: path.parent.name)
def test_the_order_of_an_ops_implementations_names_what_is_stored(path):
    """Each file with its commits, parts of it in quotes, and the command."""
    lines = re.search(r"\n((?:#.*\n)+)IMPLEMENTATIONS", path.read_text())[1]
    comment = " ".join(line.lstrip("# ") for line in lines.splitlines())
    files = re.findall(r"([\w-]+\.json) \(([\w, ]+)\)", comment)
    assert len(files) == comment.count(".json") >= 1, comment
    stored = {name: (ROOT / "benchmarks" / "h200" / name).read_text() for name, _ in files}
    for name, commits in files:
        assert all(commit in stored[name] for commit in commits.split(", ")), name
    for part in re.findall(r'"(\w+)"', comment):
        assert part in ("mosaic", "xla") or f'"{part}": ' in "".join(stored.values()), part
    commands = re.findall(r"`(carat [^`]*)`", comment)
    assert commands or "by a script that is not kept" in comment
    for command in commands:
        cli._parser().parse_args(shlex.split(command)[1:])


ABLATION = {  # rows of the table: variant, and which key counts
    "ring": ("ring", None),
    "pages of 64": ("pages of 64", None),
    "pages of 16": ("pages of 16", None),
    "padded to 64": ("padded to 64", None),
    "exact, a multiple of 64": ("exact", True),
    "exact, any other number": ("exact", False),
    "grouped": ("grouped", None),
    "per query head": ("per query head", None),
}


def test_the_table_of_the_ablation_was_measured():
    """A cell is a time, or the shortest and the longest of a sweep, rounded as it stands there."""
    page = (ROOT / "docs" / "how_it_works.md").read_text(encoding="utf-8")
    rows = results("ablation_31b.json")
    assert not any(row["void"] for row in rows)
    for name, (variant, multiple) in ABLATION.items():
        (cells,) = re.findall(rf"^\|[^|]*\| {name} \|(.*)\|$", page, re.M)
        for tokens, cell in zip((1, 4), cells.split("|"), strict=True):
            times = [
                row["us"]
                for row in rows
                if (row["variant"], row["tokens"]) == (variant, tokens)
                and multiple in (None, row["keys"] % 64 == 0)
            ]
            stated = re.findall(r"[\d.]+", cell)
            assert len(stated) == min(len(times), 2), (name, tokens)
            for text, time in zip(stated, (min(times), max(times)) if times else (), strict=False):
                assert abs(time - float(text)) <= half_a_digit(text), (name, tokens, text)


def test_the_table_of_acceptance_was_measured():
    """And what the page says of the smaller model stands in its log."""
    page = (ROOT / "docs" / "drafters.md").read_text(encoding="utf-8")
    folder = ROOT / "benchmarks" / "cpu"
    measured = json.loads((folder / "acceptance.json").read_text())["rows"]
    stated = re.findall(r"^\| (\w+)[^|]* \| (code|prose) \|(.*)\|$", page, re.M)
    assert [(kind, prompts) for kind, prompts, _ in stated] == [
        (row["kind"], row["prompts"]) for row in measured
    ]
    for row, (*_, cells) in zip(measured, stated, strict=True):
        texts = re.findall(r"[\d.]+", cells)
        for text, value in zip(texts, [row["acceptance_length"], *row["acceptance"]], strict=True):
            assert abs(value - float(text)) <= half_a_digit(text), (row, text)
    log = json.loads((folder / "smaller_model_training_log.json").read_text())
    for said in (
        f"{log['model']['parameters'] / 1e6:.2f} M parameters",
        f"{log['steps']:,} steps",
        f"{log['held_out']['loss']:.2f} nats",
    ):
        assert said in page, said


def test_the_plots_show_every_result():
    script = scripts("plot_results")
    plot = (ROOT / "docs" / "measured.svg").read_text(encoding="utf-8")
    rows = script.decode_rows()
    earlier = [row for name in script.EARLIER for row in results(name)]
    assert len(rows) == len(results("decode_*.json")) - len(earlier)
    assert not any(row.get("void") for row in rows)
    for row in rows:
        assert script.told(row) in plot, row
    plot = (ROOT / "docs" / "ablation.svg").read_text(encoding="utf-8")
    written = set(re.findall(r">([^<>]+)</text>", plot))
    for row in results("ablation_31b.json"):
        bar = row["claim"] != "padding"
        assert written >= ({row["variant"], f"{row['us']:.1f}"} if bar else {row["variant"]}), row


def test_the_api_page_has_every_public_name():
    page = (ROOT / "docs" / "api.md").read_text()
    documented = {line.rpartition(".")[2] for line in page.split("\n") if line.startswith(":::")}
    assert set(carat.__all__) - documented == {"speculative"}


def test_links_of_the_readme_lead_somewhere():
    targets = re.findall(r"\]\(([^)#]+)", (ROOT / "README.md").read_text())
    assert targets
    for target in targets:
        assert (ROOT / target).exists(), target


def test_the_site_builds(tmp_path):
    build(load_config(str(ROOT / "mkdocs.yml"), strict=True, site_dir=str(tmp_path / "site")))
    for page in ("index.html", "api/index.html", "notebooks/02_ring_buffer/index.html"):
        assert (tmp_path / "site" / page).is_file()
