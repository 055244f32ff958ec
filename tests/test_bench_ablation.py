"""`carat bench ablation` on a small shape: rows of all three claims, floors, errors, plots."""

import dataclasses
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_model
from progress import only_progress

from carat_jax import cli, compilation_cache, memory
from carat_jax.bench import ablation, ablation_plots, cases, timing
from carat_jax.config import PRESETS

BANDWIDTH = 1e9  # bytes per second, so that times of a floor are no zeros
SMALL = dataclasses.replace(small_model.CONFIG, dtype="bfloat16")  # N 4; K 2, H 8; K 1, H 16


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """A small size, few and short measurements."""
    monkeypatch.setitem(PRESETS, "small", SMALL)
    monkeypatch.setattr(compilation_cache, "enable", lambda: None)
    monkeypatch.setattr(timing, "TURNOVER", 1)
    monkeypatch.setattr(timing, "TRAIN_SECONDS", 0.0)
    monkeypatch.setattr(timing, "CALLS", 4)
    monkeypatch.setitem(memory.READ_BANDWIDTH, jax.devices()[0].device_kind, BANDWIDTH)


def measured(capsys, tmp_path, *argv: str) -> tuple[dict, list[str]]:
    """The JSON that the benchmark writes and the lines that it prints."""
    file = tmp_path / "result.json"
    assert cli.main(["bench", "ablation", "--config", "small", *argv, "--json", str(file)]) == 0
    printed = capsys.readouterr()
    assert only_progress(printed.err)
    return json.loads(file.read_text()), printed.out.splitlines()


def check(row: dict, read: int) -> None:
    """A sound row whose call must read `read` bytes."""
    assert row["floor_us"] == pytest.approx(1e6 * read / BANDWIDTH, abs=0.01)
    assert 0 < row["us_min"] <= row["us"] <= row["us_max"]
    assert row["ratio"] == pytest.approx(row["us"] / row["floor_us"], rel=0.02, abs=0.02)
    assert 1e-4 < row["error"] < 5e-3  # of rounding to bfloat16
    assert row["void"] is False


def test_ring(capsys, tmp_path):
    result, lines = measured(capsys, tmp_path, "--claim", "ring", "--context", "150", "--no-png")
    assert [(row["variant"], row["tokens"]) for row in result["rows"]] == [
        (variant, tokens) for tokens in (1, 4) for variant in ("ring", "pages of 64", "pages of 16")
    ]
    for row in result["rows"]:
        assert (row["claim"], row["keys"]) == ("ring", 150)
        check(row, 2 * (16 + row["tokens"] - 1) * (8 + 8) * 2)
    assert len(lines) == 1 + 6
    assert result["plots"] == []


def test_padding(capsys, tmp_path):
    argv = ["--claim", "padding", "--keys", "60", "70", "8", "--no-png"]
    result, lines = measured(capsys, tmp_path, *argv)
    assert [(row["variant"], row["keys"]) for row in result["rows"]] == [
        (variant, keys) for keys in (60, 63, 64, 65, 68) for variant in ("exact", "padded to 64")
    ]
    for row in result["rows"]:
        check(row, 1 * row["keys"] * (16 + 16) * 2)
    exact = sorted(row["us"] for row in result["rows"] if row["variant"] == "exact")
    assert lines[1].split()[:4] == ["padding", "exact", "4", "60–68"]
    assert [float(cell) for cell in lines[1].split()[4:6]] == [exact[2], exact[4]]


def test_grouping(capsys, tmp_path):
    result, _ = measured(capsys, tmp_path, "--claim", "grouping", "--context", "50", "--no-png")
    assert [(row["variant"], row["tokens"]) for row in result["rows"]] == [
        (variant, tokens) for tokens in (1, 4) for variant in ("grouped", "per query head")
    ]
    for row in result["rows"]:
        check(row, 1 * 50 * (16 + 16) * 2)


def test_a_wrong_variant_is_void(capsys, tmp_path, monkeypatch):
    """A page table in the wrong order gathers the right keys for the wrong positions."""
    paged = ablation._paged

    def shuffled(*args):
        pools, where = paged(*args)
        return pools, where | {"table": where["table"][::-1]}

    monkeypatch.setattr(ablation, "_paged", shuffled)
    monkeypatch.setattr(ablation, "TOKENS", (4,))
    argv = ["--claim", "ring", "--context", "150", "--no-png"]
    result, _ = measured(capsys, tmp_path, *argv)
    assert [row["void"] for row in result["rows"]] == [
        False,
        False,
        True,
    ]  # one page of 64 holds all
    assert result["rows"][-1]["error"] > 0.1


def test_the_keys_are_read_again_for_each_query_head():
    """Optimised, the passes are still apart: products over the keys for each head of the group."""
    (case,) = cases.cases(SMALL, "global", 64, tokens=4)
    case = dataclasses.replace(case, compact=False)
    q, shared = case.queries()
    products = {}
    for name, step in (("apart", ablation._per_query_head), ("grouped", ablation._grouped)):
        text = jax.jit(step).lower(q, case.buffer(0), shared).compile().as_text()
        products[name] = text.count(" dot(") + text.count("__onednn$matmul")
    assert products == {"apart": 4 * 2, "grouped": 2}


def test_pages_are_scattered():
    (case,) = cases.cases(SMALL, "ring", 150, tokens=4)
    ring = case.buffer(0)
    (pool,), where = ablation._paged(case, [ring], 16)
    assert pool["k"].shape == (2 * 2, 16, 2, 8)  # positions 131 to 149 begin in page 8, end in 9
    table = np.asarray(where["table"])
    assert sorted(set(table)) == sorted(table)
    for position in range(131, 150):
        page, row = divmod(position, 16)
        held = pool["k"][table[page - int(where["first"]) // 16], row]
        assert jnp.array_equal(held, ring["k"][0, :, position % case.capacity])


# --- Plots ---------------------------------------------------------------------------------------


def rows_of_each_claim(**changed) -> list[dict]:
    common = {"us": 20.0, "floor_us": 5.0, "void": False} | changed
    rows = []
    for claim, variants in (("ring", ("ring", "pages of 64")), ("grouping", ("grouped", "apart"))):
        rows += [
            {"claim": claim, "variant": variant, "tokens": tokens, "keys": 6005} | common
            for variant in variants
            for tokens in (1, 4)
        ]
    rows += [
        {"claim": "padding", "variant": variant, "tokens": 4, "keys": keys} | common
        for variant in ("exact", "padded to 64")
        for keys in (5900, 5952, 6016)
    ]
    return rows


@pytest.mark.parametrize("floor", [5.0, None])
def test_a_plot_for_each_claim(tmp_path, floor):
    folder = tmp_path / "new" / "plots"
    ablation_plots.prepare(folder)
    rows = rows_of_each_claim(floor_us=floor)
    rows[0]["void"] = True
    written = ablation_plots.draw(rows, "31b", folder)
    claims = ("ring", "grouping", "padding")
    assert written == [str(folder / f"ablation_31b_{claim}.png") for claim in claims]
    for file in folder.iterdir():
        assert file.read_bytes().startswith(b"\x89PNG")
        assert file.stat().st_size > 10_000


def test_void_rows_are_not_drawn(tmp_path):
    assert ablation_plots.draw(rows_of_each_claim(void=True), "31b", tmp_path) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("elsewhere", [False, True])
def test_png(capsys, tmp_path, monkeypatch, elsewhere):
    """Beside the JSON, or where --png says."""
    monkeypatch.setattr(ablation, "TOKENS", (1,))
    folder = tmp_path / "plots" if elsewhere else tmp_path
    argv = ["--claim", "grouping", "--context", "20"]
    result, lines = measured(capsys, tmp_path, *argv, *(["--png", str(folder)] * elsewhere))
    file = folder / "ablation_small_grouping.png"
    assert result["plots"] == [str(file)]
    assert lines[-1] == f"wrote {file}"
    assert list(tmp_path.rglob("*.png")) == [file]


# --- What is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        ("--keys 70 60 5", "--keys 70 60 5: FIRST <= LAST and STEP >= 1 are needed"),
        ("--keys 60 70 0", "--keys 60 70 0: FIRST <= LAST and STEP >= 1 are needed"),
        ("--keys 3 70 1", "context 3 holds the 4 new tokens too: it must be from 4 to 4,096"),
        (
            "--context 4097 --claim ring",
            "it must be from 4 to 4,096, which is as far as the model goes",
        ),
    ],
)
def test_nothing_is_made_for_numbers_that_do_not_fit(capsys, monkeypatch, argv, told):
    monkeypatch.delattr(cases.Case, "buffer")
    assert cli.main(["bench", "ablation", "--config", "small", *argv.split()]) == 1
    assert told in capsys.readouterr().err


def test_nothing_is_drawn_without_a_file_for_the_result(monkeypatch):
    """Nor is matplotlib needed then."""
    monkeypatch.setattr(ablation_plots, "prepare", None)
    monkeypatch.setitem(ablation.CLAIMS, "ring", lambda config, counts: [])
    assert (
        cli.main(["bench", "ablation", "--config", "small", "--claim", "ring", "--context", "50"])
        == 0
    )


@pytest.mark.parametrize("option", ["--png", "--json"])
def test_without_matplotlib(capsys, tmp_path, monkeypatch, option):
    monkeypatch.delattr(cases.Case, "buffer")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    argv = ["bench", "ablation", "--config", "small", "--claim", "padding"]
    argv += ["--keys", "60", "70", "5", option, str(tmp_path / "plots" / "to")]
    assert cli.main(argv) == 1
    told = capsys.readouterr().err
    assert "plots need matplotlib, which is not installed: pip install matplotlib, or" in told
    assert "--no-png" in told
    assert told.count("\n") == 1
    assert not (tmp_path / "plots").exists()


def test_help(capsys):
    with pytest.raises(SystemExit):
        cli.main(["bench", "ablation", "--help"])
    told = " ".join(capsys.readouterr().out.split())
    for word in ("ring, padding, grouping", "5900 6100 5", "--png DIR", "--no-png", "matplotlib"):
        assert word in told
