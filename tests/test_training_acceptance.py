"""The table of a drafter's acceptance: its prompts and its arithmetic."""

import types

import pytest

from carat_jax.generation import Generation, Stats
from carat_jax.speculative import Ngram
from carat_jax.training import acceptance

LONG = "    x = 1\n" * 50
WORDS = "It says what it does. " * 30


def sources() -> dict[str, str]:
    return {
        "a.py": f'"""{WORDS}"""\n\ndef short():\n    pass\n\ndef long():\n{LONG}',
        "b.py": f'class Big:\n    """Short."""\n{LONG}',
        "broken.py": "def f(:\n",
    }


def test_prompts_are_long_definitions_and_long_docstrings():
    assert [text.split("\n")[0] for text in acceptance.code(sources())] == [
        "def long():",
        "class Big:",
    ]
    assert acceptance.prose(sources()) == [WORDS]


def finished(rounds: int, per_position: list[float], accepted: int) -> Generation:
    stats = Stats(
        ttft_s=1.0,
        tpot_s=1.0,
        drafted=2 * rounds,
        accepted=accepted,
        per_position=per_position,
        rounds={2: rounds},
    )
    return Generation("", [1] * (rounds + accepted), "length", 3, None, None, stats)


def test_rows_weigh_every_round_alike():
    # 4 rounds with 3 and 1 guesses right, 6 with 0 and 0: in ten rounds 3 and 1.
    results = [finished(4, [0.75, 0.25], 4), finished(6, [0.0, 0.0], 0)]
    asked = []

    def generate(prompts, **options):
        asked.append((prompts, options["num_proposals"], options["stop_token_ids"]))
        return results

    gemma = types.SimpleNamespace(generate=generate)
    (row,) = acceptance.measure(gemma, {"own": Ngram()}, {"code": ["p", "q"]}, 2, 9)
    assert row["acceptance"] == pytest.approx([0.3, 0.1])
    assert row["acceptance_length"] == pytest.approx(1.4)
    assert (row["count"], row["tokens"]) == (2, 14)
    assert asked == [(["p", "q"], 2, ())]
    heading, line = acceptance.table([row]).split("\n")
    assert line.split() == ["ngram", "own", "code", "1.40", "0.300", "0.100"]
    assert heading.split()[-2:] == ["1", "2"]


def test_a_corpus_without_sources_is_refused_by_name(tmp_path, capsys):
    with pytest.raises(SystemExit):
        acceptance.main(["--corpus", str(tmp_path), "--drafter", "ngram", "--out", str(tmp_path)])
    assert str(tmp_path) in capsys.readouterr().err
