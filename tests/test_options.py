"""What a caller may ask for, what is refused and how, and the defaults that a checkpoint states."""

import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from carat_jax.options import MAX_TOP_LOGPROBS, GenerateOptions, OptionError

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("max_new_tokens", 0, "max_new_tokens = 0: it must be an integer in [1, "),
        ("max_new_tokens", -1, "max_new_tokens = -1"),
        ("max_new_tokens", 2**31, "max_new_tokens = 2147483648"),
        ("max_new_tokens", 8.0, "max_new_tokens = 8.0"),
        ("max_new_tokens", "8", "max_new_tokens = '8'"),
        ("max_new_tokens", True, "max_new_tokens = True"),
        ("max_new_tokens", None, "max_new_tokens = None"),
        ("temperature", -0.1, "temperature = -0.1: it must be at least 0 and finite"),
        ("temperature", NAN, "temperature = nan"),
        ("temperature", np.float32("nan"), "temperature = nan"),
        ("temperature", INF, "temperature = inf"),
        ("temperature", 1e39, "temperature = 1e+39"),  # infinite in float32
        ("temperature", 10**400, "temperature = 1000"),
        ("temperature", "1", "temperature = '1': it must be a number"),
        ("temperature", True, "temperature = True: it must be a number"),
        ("temperature", None, "temperature = None: it must be a number"),
        ("top_k", -1, "top_k = -1: it must be an integer in [0, "),
        ("top_k", 1.5, "top_k = 1.5"),
        ("top_k", 2**31, "top_k = 2147483648"),
        ("top_p", 0, "top_p = 0: it must be in (0, 1]"),
        ("top_p", 0.0, "top_p = 0.0"),
        ("top_p", -0.5, "top_p = -0.5"),
        ("top_p", 1.0001, "top_p = 1.0001"),
        ("top_p", NAN, "top_p = nan"),
        ("top_p", INF, "top_p = inf"),
        ("min_p", -1e-9, "min_p = -1e-09: it must be in [0, 1]"),
        ("min_p", 1.5, "min_p = 1.5"),
        ("min_p", NAN, "min_p = nan"),
        ("seed", -1, "seed = -1: it must be an integer in [0, 2**32)"),
        ("seed", 2**32, "seed = 4294967296"),
        ("seed", 0.5, "seed = 0.5"),
        ("seed", None, "seed = None: give an integer or a list"),
        ("seed", "a", "seed = 'a'"),
        ("seed", [1, -1], "seed = -1"),
        ("seed", [1, None], "seed = None"),
        ("stop", "", "stop has ''"),
        ("stop", ["a", ""], "stop has ''"),
        ("stop", [1], "stop has 1"),
        ("stop", {"a"}, "stop = {'a'}: give a list"),
        ("stop", 3, "stop = 3: give a list"),
        ("stop_token_ids", 106, "stop_token_ids = 106: give a list"),
        ("stop_token_ids", np.int64(106), "stop_token_ids = 106: give a list"),
        ("stop_token_ids", [-1], "stop_token_ids has -1"),
        ("stop_token_ids", [1.0], "stop_token_ids has 1.0"),
        ("stop_token_ids", [True], "stop_token_ids has True"),
        ("stop_token_ids", [2**31], "stop_token_ids has 2147483648"),
        ("stop_token_ids", "1", "stop_token_ids has '1'"),
        ("stop_token_ids", [[1]], "stop_token_ids has [1]"),
        ("suppress_tokens", [-3], "suppress_tokens has -3"),
        ("suppress_tokens", ["x"], "suppress_tokens has 'x'"),
        ("logprobs", -1, "logprobs = -1"),
        ("logprobs", MAX_TOP_LOGPROBS + 1, f"logprobs = {MAX_TOP_LOGPROBS + 1}"),
        ("logprobs", 1.0, "logprobs = 1.0"),
        ("logprobs", None, "logprobs = None"),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(name, value, told):
    with pytest.raises(OptionError) as refused:
        GenerateOptions(**{name: value})
    message = str(refused.value)
    assert message.startswith(told)
    assert "\n" not in message
    with pytest.raises(OptionError):
        GenerateOptions().replace(**{name: value})


@pytest.mark.parametrize(
    ("name", "value", "kept"),
    [
        ("max_new_tokens", 1, 1),
        ("max_new_tokens", np.int64(7), 7),
        ("temperature", 0, 0),
        ("temperature", np.float32(0.5), 0.5),
        ("temperature", 3e38, 3e38),
        ("top_k", 2**31 - 1, 2**31 - 1),
        ("top_p", 1, 1),
        ("top_p", 1e-300, 1e-300),
        ("min_p", 0, 0),
        ("min_p", 1, 1),
        ("seed", 2**32 - 1, 2**32 - 1),
        ("seed", [0, 7], (0, 7)),
        ("seed", np.array([3, 4], np.uint32), (3, 4)),
        ("stop", "end", ("end",)),
        ("stop", ["a", "bc"], ("a", "bc")),
        ("stop", None, ()),
        ("stop_token_ids", [], ()),
        ("stop_token_ids", range(3), (0, 1, 2)),
        ("stop_token_ids", np.array([1, 106]), (1, 106)),
        ("suppress_tokens", jnp.array([5, 6]), (5, 6)),
        ("logprobs", MAX_TOP_LOGPROBS, MAX_TOP_LOGPROBS),
    ],
)
def test_a_value_at_the_edge_is_taken(name, value, kept):
    options = GenerateOptions(**{name: value})
    assert getattr(options, name) == kept
    assert hash(options) == hash(GenerateOptions(**{name: kept}))  # static under jit


def test_how_many_logprobs():
    assert [GenerateOptions(logprobs=x).num_logprobs for x in (False, True, 0, 1, 5)] == [
        None, 0, 0, 1, 5,
    ]  # fmt: skip


def test_replace():
    options = GenerateOptions(temperature=0.5, stop=["x"])
    changed = options.replace(top_k=3)
    assert (changed.temperature, changed.top_k, changed.stop) == (0.5, 3, ("x",))
    assert options.top_k == 0
    with pytest.raises(OptionError, match=r"no option 'top_n': there are .*max_new_tokens"):
        options.replace(top_n=3)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"stop_token_ids": [99, 100]}, "stop_token_ids has 100: ids go to 99"),
        ({"suppress_tokens": [512]}, "suppress_tokens has 512: ids go to 99"),
        ({"suppress_tokens": range(100)}, "leaves no token"),
        ({"logprobs": 101}, "logprobs = 101: the vocabulary has 100 ids"),
    ],
)
def test_ids_that_a_vocabulary_does_not_have(given, told):
    options = GenerateOptions(**given)
    with pytest.raises(OptionError, match=told):
        options.check_vocabulary(100)
    options.check_vocabulary(513)


def test_the_limits_of_a_vocabulary_are_within():
    GenerateOptions(
        stop_token_ids=[99], suppress_tokens=[*range(99), 3, 3], logprobs=100
    ).check_vocabulary(100)


# --- generation_config.json ----------------------------------------------------------------------


def read(folder: Path, content: object) -> GenerateOptions:
    path = folder / "generation_config.json"
    text = content if isinstance(content, str) else json.dumps(content)
    path.write_text(text, encoding="utf-8")
    return GenerateOptions.from_generation_config(path)


def test_what_the_published_models_state(tmp_path):
    stored = Path(__file__).parent / "fixtures/dense_31b_like/generation_config.json"
    shutil.copy(stored, tmp_path)
    options = GenerateOptions.from_generation_config(tmp_path / stored.name)
    assert options == GenerateOptions(
        temperature=1.0, top_k=64, top_p=0.95, stop_token_ids=[1, 106, 50]
    )


def test_without_the_file(tmp_path):
    options = GenerateOptions.from_generation_config(tmp_path / "generation_config.json")
    assert options == GenerateOptions(temperature=0, stop_token_ids=[1])


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({}, {}),
        ({"eos_token_id": 106}, {"stop_token_ids": [106]}),
        ({"eos_token_id": []}, {"stop_token_ids": []}),
        ({"eos_token_id": None, "suppress_tokens": None}, {}),
        ({"suppress_tokens": [258883, 258882]}, {"suppress_tokens": [258883, 258882]}),
        ({"temperature": 0.3, "top_k": 5, "top_p": 0.5}, {}),  # greedy unless do_sample
        ({"do_sample": False, "temperature": 0.3}, {}),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"do_sample": True, "temperature": None, "top_k": None}, {"temperature": 1.0}),
        ({"do_sample": True, "temperature": 0.3, "min_p": 0.1}, {"temperature": 0.3, "min_p": 0.1}),
        ({"do_sample": True, "top_k": 0}, {"temperature": 1.0, "top_k": 0}),
        ({"transformers_version": "5.24.0", "use_cache": True, "num_beams": 4}, {}),
    ],
    ids=json.dumps,
)
def test_defaults_of_a_checkpoint(tmp_path, content, expected):
    assert read(tmp_path, content) == GenerateOptions(**{"stop_token_ids": [1]} | expected)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[1]",
        "3",
        "null",
        "[" * 100_000,
        {"eos_token_id": "1"},
        {"eos_token_id": True},
        {"eos_token_id": -1},
        {"eos_token_id": 1.5},
        {"eos_token_id": {"a": 1}},
        {"suppress_tokens": "all"},
        '{"do_sample": true, "temperature": NaN}',
        {"do_sample": True, "temperature": -1},
        {"do_sample": True, "top_p": 0},
        {"do_sample": True, "top_k": "64"},
    ],
    ids=lambda content: str(content)[:30],
)
def test_a_file_that_cannot_be_used(tmp_path, content):
    with pytest.raises(OptionError) as refused:
        read(tmp_path, content)
    assert str(tmp_path / "generation_config.json") in str(refused.value)


def test_a_file_that_is_not_utf_8(tmp_path):
    path = tmp_path / "generation_config.json"
    path.write_bytes(b'{"a": "\xff"}')
    with pytest.raises(OptionError, match="not valid JSON"):
        GenerateOptions.from_generation_config(path)
