"""`carat bench agreement`: every difference that there is, and no other."""

import dataclasses
import json

import pytest
import scripted_model
import small_model
from progress import only_progress

from carat_jax import cli, compilation_cache
from carat_jax.bench import agreement, random_model
from carat_jax.config import PRESETS
from carat_jax.gemma import Gemma

TOKENS, VOCABULARY = 30, scripted_model.SIZE


@pytest.fixture(autouse=True)
def a_small_preset(monkeypatch):
    monkeypatch.setitem(PRESETS, "small", small_model.CONFIG)
    monkeypatch.setattr(random_model, "init_params", lambda *_: small_model.params())
    monkeypatch.setattr(compilation_cache, "enable", lambda: None)


def measured(capsys, tmp_path, *argv: str) -> tuple[dict, list[str]]:
    """The JSON that the benchmark writes and the lines that it prints."""
    file = tmp_path / "result.json"
    argv = ("--tokens", str(TOKENS), "--dtype", "float32", *argv)
    assert cli.main(["bench", "agreement", *argv, "--json", str(file)]) == 0
    printed = capsys.readouterr()
    assert only_progress(printed.err)
    return json.loads(file.read_text()), printed.out.splitlines()


@pytest.mark.parametrize(("temperature", "distinct"), [("0", 1), ("1", 10)])
def test_in_float32_nothing_differs(capsys, tmp_path, temperature, distinct):
    argv = ["--config", "small", "--prompt", "7", "--acceptance", "1", "0.5"]
    argv += ["--temperature", temperature]
    result, lines = measured(capsys, tmp_path, *argv)
    assert result["benchmark"] == "agreement"
    for row, shares in zip(result["rows"], ([1.0, 0.5], [0.0]), strict=True):
        assert (row["model"], row["dtype"], row["prompt"]) == ("small", "float32", "7 ids")
        assert (row["proposals"], row["acceptance"]) == (4, shares)
        assert (row["tokens"], row["equal"], row["differences"]) == (TOKENS, TOKENS, [])
        assert distinct < row["distinct"] <= TOKENS
        assert row["least_gap"] > 0
    # Of the guesses none is right beyond the shares, and with one after a right one, two or three.
    scripted, wrong = (row["acceptance_length"] for row in result["rows"])
    assert 2 < scripted < 3
    assert wrong == 1
    assert len(lines) == 1 + 2


@pytest.mark.parametrize(("temperature", "named", "equal"), [("0", 4, TOKENS - 4), ("0.01", 1, 9)])
def test_differences_are_named_with_their_gaps(
    capsys, tmp_path, monkeypatch, temperature, named, equal
):
    """A model that counts, and a plain run that is said to have counted wrong twice: all are named,
    or of drawn tokens the first."""
    folder = str(scripted_model.write(tmp_path, [*range(VOCABULARY), 0]))
    (last,) = random_model.random_ids(scripted_model.CONFIG, 1, 5)[0, -1:].tolist()
    counted = [(last + 1 + i) % VOCABULARY for i in range(TOKENS)]
    said = list(counted)
    said[9] = said[20] = 50
    tops = [{token: -0.25, (token + 1) % VOCABULARY: -2.0} for token in said]
    tops[9] = {50: -0.5, counted[9]: -0.625}
    generate = Gemma.generate

    def generates(self, prompt, **options):
        made = generate(self, prompt, **options)
        if "drafter" in options:
            return made
        assert made.tokens == counted
        return dataclasses.replace(made, tokens=said, top_logprobs=tops)

    monkeypatch.setattr(Gemma, "generate", generates)
    argv = ["--model", folder, "--prompt", "5", "--temperature", temperature]
    result, lines = measured(capsys, tmp_path, *argv)
    # After a wrong 50 comes 51, though the plain run is said to have gone on counting.
    expected = [
        {"position": 9, "plain": 50, "speculative": counted[9], "gap": 0.125},
        {"position": 10, "plain": counted[10], "speculative": 51, "gap": 1.75},
        {"position": 20, "plain": 50, "speculative": counted[20], "gap": 1.75},
        {"position": 21, "plain": counted[21], "speculative": 51, "gap": 1.75},
    ]
    assert len(result["rows"]) == 2
    for row in result["rows"]:
        assert row["model"] == folder
        gaps = {} if temperature == "0" else {"gap": None}
        assert row["differences"] == [one | gaps for one in expected[:named]]
        assert (row["equal"], row["least_gap"]) == (equal, 0.125)
        assert row["distinct"] == TOKENS - 1
    assert len(lines) == 1 + 2 + 1 + 1 + 2 * named
    gap = "0.125" if temperature == "0" else "–"
    assert lines[5].split()[-4:] == ["9", "50", str(counted[9]), gap]


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--config", "31b", "--model", "tiny"], "--model and --config: give one"),
        (["--tokens", "0"], "--tokens 0: from 1 on"),
        (["--config", "31b", "--prompt", "0"], "--prompt 0 and"),
        (["--config", "31b", "--tokens", "262144"], "together at most 262,144"),
        (["--config", "31b", "--prompt", "def "], "'def ' is a text"),
        (["--num-proposals", "4", "0"], "num_proposals = 0"),
        (["--config", "31b", "--num-proposals", "16"], "num_proposals = 16"),
        (["--acceptance", "0.5", "0.7"], "none above the last"),
        (["--model", "nowhere"], "nowhere"),
        (["--temperature", "-1"], "temperature = -1"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_nothing_is_made_for_arguments_that_do_not_fit(capsys, monkeypatch, argv, told):
    monkeypatch.delattr(random_model, "make")
    monkeypatch.delattr(agreement, "load")
    assert cli.main(["bench", "agreement", *argv]) == 1
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "told"), [("a" * 499, "prompt 500 + 30 new tokens exceeds"), ("", "empty prompt")]
)
def test_a_text_that_does_not_fit_is_refused_before_another_is_run(
    capsys, tmp_path, monkeypatch, text, told
):
    folder = str(scripted_model.write(tmp_path, [*range(VOCABULARY), 0]))
    monkeypatch.delattr(Gemma, "generate")
    argv = ["--model", folder, "--tokens", str(TOKENS), "--prompt", "5", text]
    assert cli.main(["bench", "agreement", *argv]) == 1
    assert told in capsys.readouterr().err
