"""The `carat` command, in this process: output, exit status, and one line for what goes wrong."""

import argparse
import dataclasses
import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import pytest
import scripted_model
from scripted_model import chain
from test_memory import SIZES

import carat_jax as carat
from carat_jax import cli, compilation_cache, gemma, memory
from carat_jax.config import PRESETS


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    """A checkpoint that continues "a" with " bcd", and answers "\n" with "Hi!"."""
    made = tmp_path_factory.mktemp("scripted")
    return str(
        scripted_model.write(made, chain("a", " bcd", "<eos>"), chain("\n", "Hi!", "<turn|>"))
    )


@pytest.fixture(autouse=True)
def no_files_in_the_users_cache(monkeypatch):
    monkeypatch.setattr(compilation_cache, "enable", lambda: None)


def run(capsys, *argv: str, stdin: str | None = None, monkeypatch=None) -> tuple[int, str, str]:
    """Exit status, standard output and standard error of `carat *argv`."""
    if stdin is not None:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
    status = cli.main(argv)
    return status, *capsys.readouterr()


def fails(capsys, *argv: str) -> str:
    """What a failing command says."""
    status, out, err = run(capsys, *argv)
    assert (status, out) == (1, "")
    assert err.startswith("carat: ")
    assert "Traceback" not in err
    return err.removeprefix("carat: ")


def fails_in_one_line(capsys, *argv: str) -> str:
    err = fails(capsys, *argv)
    assert err.count("\n") == 1
    assert err.endswith("\n")
    return err


# --- Help ----------------------------------------------------------------------------------------


def parsers(parser: argparse.ArgumentParser, name: str = "carat") -> dict:
    found = {name: parser}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command, sub in action.choices.items():
                found |= parsers(sub, f"{name} {command}")
    return found


ALL = parsers(cli._parser())


def test_the_commands():
    assert set(ALL) == {
        "carat", "carat generate", "carat chat", "carat info", "carat convert", "carat bench",
        "carat bench decode", "carat bench prefill", "carat bench attention",
        "carat bench ablation", "carat bench speculative", "carat bench agreement",
        "carat bench serving",
    }  # fmt: skip


@pytest.mark.parametrize("name", ALL)
def test_help_explains_every_argument(capsys, name):
    with pytest.raises(SystemExit) as ended:
        cli.main([*name.split()[1:], "--help"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"usage: {name} ")
    for action in ALL[name]._actions:
        assert action.help or isinstance(action, argparse._SubParsersAction), action.dest
        for option in action.option_strings:
            assert option in printed
    assert ALL[name].description


def test_without_a_command_help_is_printed(capsys):
    status, out, err = run(capsys)
    assert (status, err) == (0, "")
    assert out.startswith("usage: carat ")
    assert 'carat generate "def "' in out


@pytest.mark.parametrize(
    "argv",
    [
        ["nonsense"],
        ["generate"],
        ["generate", "a", "--max-new-tokens", "many"],
        ["generate", "a", "--dtype", "float16"],
        ["info"],
        ["bench"],
        ["bench", "nonsense"],
        ["bench", "decode", "--config", "nonsense"],
    ],
    ids=" ".join,
)
def test_wrong_usage_ends_with_two(capsys, argv):
    with pytest.raises(SystemExit) as ended:
        cli.main(argv)
    assert ended.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("usage: carat ")


# --- generate ------------------------------------------------------------------------------------


def test_generate_prints_the_prompt_and_what_follows(capsys, folder):
    assert run(capsys, "generate", "a", "--model", folder) == (0, "a bcd\n", "")


def test_generate_reads_standard_input(capsys, folder, monkeypatch):
    ran = run(capsys, "generate", "-", "--model", folder, stdin="xyz\na", monkeypatch=monkeypatch)
    assert ran == (0, "xyz\na bcd\n", "")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--max-new-tokens", "2"], " b"),
        (["--stop", "d"], " bc"),
        (["--stop", "d", "--stop", "bc"], " "),
        (["--max-context", "511", "--max-new-tokens", "3"], " bc"),
        (["--temperature", "0.5", "--top-k", "1", "--seed", "3"], " bcd"),
        (["--temperature", "9", "--top-p", "0.0001"], " bcd"),
        (["--temperature", "9", "--min-p", "1"], " bcd"),
        (["--dtype", "float32"], " bcd"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_generate_takes_options(capsys, folder, options, text):
    ran = run(capsys, "generate", "a", "--model", folder, *options)
    assert ran == (0, f"a{text}\n", "")


def test_generate_as_json(capsys, folder):
    status, out, _ = run(capsys, "generate", "a", "--model", folder, "--json")
    assert status == 0
    printed = json.loads(out)
    expected = carat.load(folder).generate("a")
    assert set(printed) == {field.name for field in dataclasses.fields(carat.Generation)}
    assert set(printed.pop("stats")) == {
        "ttft_s", "tpot_s", "queue_s", "drafted", "accepted", "per_position",
        "acceptance_length", "rounds", "draft_s", "verify_s",
    }  # fmt: skip
    assert printed == {k: v for k, v in dataclasses.asdict(expected).items() if k != "stats"}
    assert (printed["text"], printed["finish_reason"]) == (" bcd", "stop")


def test_generate_with_the_bundled_model(capsys):
    """Whatever its weights are: a prompt goes in, text comes out, the same each time."""
    argv = ["generate", "def ", "--max-new-tokens", "8"]
    status, out, err = run(capsys, *argv)
    assert (status, err) == (0, "")
    assert out.startswith("def ")
    assert len(out) > len("def \n")
    assert run(capsys, *argv) == (0, out, "")


def test_damaged_weights_are_told(capsys, folder, monkeypatch):
    broken = scripted_model.gemma(chain("a", "bcd", "<eos>"), damaged=[scripted_model.ID["c"]])
    monkeypatch.setattr(gemma, "load", lambda *_, **__: broken)
    status, out, err = run(capsys, "generate", "a")
    assert (status, out) == (1, "abc\n")
    assert err.startswith("carat: the logits of token 2 hold NaN or Inf")


# --- What goes wrong -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        ([""], "empty prompt"),
        (["a", "--max-new-tokens", "0"], "max_new_tokens = 0"),
        (["a", "--max-new-tokens", "-3"], "max_new_tokens = -3"),
        (["a", "--max-new-tokens", "511"], "prompt 2 + 511 new tokens exceeds max_context 512"),
        (["a", "--max-context", "9"], "exceeds max_context 9: give max_new_tokens of at most 7"),
        (["a", "--max-context", "0"], "max_context = 0: it must be an integer from 1 to"),
        (["a", "--max-context", "513"], "max_position_embeddings 512"),
        (["a", "--temperature", "nan"], "temperature = nan"),
        (["a", "--temperature", "-1"], "temperature = -1.0"),
        (["a", "--top-k", "-1"], "top_k = -1"),
        (["a", "--top-p", "0"], "top_p = 0.0: it must be in (0, 1]"),
        (["a", "--top-p", "nan"], "top_p = nan"),
        (["a", "--min-p", "1.1"], "min_p = 1.1"),
        (["a", "--seed", "-1"], "seed = -1"),
        (["a", "--stop", ""], "stop has ''"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_options_out_of_range(capsys, folder, argv, told):
    assert told in fails_in_one_line(capsys, "generate", *argv, "--model", folder)
    assert told in fails_in_one_line(capsys, "generate", *argv, "--model", folder, "--json")


def test_standard_input_that_is_no_text(capsys, folder, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe"), encoding="utf-8"))
    assert "utf-8" in fails_in_one_line(capsys, "generate", "-", "--model", folder)


def write_config(folder: Path, **changed: object) -> None:
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | changed))


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])


def lie(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes((2**40).to_bytes(8, "little") + path.read_bytes()[8:])


def point_outside(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"model.norm.weight": "../other/model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def only_pickles(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda f: (f / "config.json").unlink(), "config.json"),
        (lambda f: (f / "config.json").write_text("{"), "JSON"),
        (lambda f: write_config(f, model_type="llama"), "llama"),
        (lambda f: write_config(f, dtype="float16"), "float16"),
        (lambda f: write_config(f, auto_map={"AutoModel": "x"}), "auto_map"),
        (lambda f: write_config(f, attn_logit_softcapping=50.0), "attn_logit_softcapping"),
        (lambda f: write_config(f, vocab_size=300), "tokenizer.json has 3"),
        (lambda f: (f / "model.safetensors").unlink(), "model.safetensors"),
        (truncate, "damaged"),
        (lie, "damaged"),
        (point_outside, "refused"),
        (only_pickles, "pickle"),
        (lambda f: (f / "tokenizer.json").write_text("{}"), "tokenizer.json"),
        (lambda f: (f / "tokenizer.json").unlink(), "no tokenizer.json: give token ids"),
        (lambda f: (f / "generation_config.json").write_text('{"eos_token_id": 384}'), "384"),
        (lambda f: (f / "generation_config.json").write_text("["), "generation_config.json"),
        (lambda f: (f / "chat_template.jinja").write_text("{% for"), "chat_template.jinja"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_folder_that_cannot_be_used(capsys, folder, tmp_path, damage, told):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    damage(copy)
    assert told in fails_in_one_line(capsys, "generate", "a", "--model", str(copy))


def test_weights_that_do_not_fit_are_all_listed(capsys, folder, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    write_config(copy, hidden_size=383, intermediate_size=99)
    told = fails(capsys, "generate", "a", "--model", str(copy))
    assert "model.embed_tokens.weight has shape [384, 384]" in told
    assert "model.layers.0.mlp.up_proj.weight" in told


@pytest.mark.parametrize("command", [["generate", "a", "--model"], ["chat", "--model"], ["info"]])
@pytest.mark.parametrize("name", ["nonsense", "/nonsense", "", "31c"])
def test_a_model_that_is_nowhere(capsys, command, name):
    assert "give 'tiny' (bundled), a folder" in fails_in_one_line(capsys, *command, name)


def test_a_size_is_no_model(capsys):
    told = fails_in_one_line(capsys, "generate", "a", "--model", "31b")
    assert "a preset, which has no weights" in told and "google/gemma-4-31B-it" in told
    assert ", or a size: e2b, e4b, 12b, 26b-a4b, 31b" in fails_in_one_line(capsys, "info", "7b")


def test_ctrl_c(capsys, monkeypatch):
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(gemma, "load", interrupt)
    assert run(capsys, "generate", "a") == (130, "", "\n")


def test_out_of_memory_and_what_nobody_expects(capsys, monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise jax.errors.JaxRuntimeError(text)

    monkeypatch.setattr(gemma, "load", fail)
    text = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 61394690680 bytes."
    assert "the device is out of memory: choose a smaller" in fails_in_one_line(
        capsys, "generate", "a"
    )
    text = "INTERNAL: something else"
    with pytest.raises(jax.errors.JaxRuntimeError):  # a fault of ours: its traceback is wanted
        cli.main(["generate", "a"])


def test_a_reader_that_goes_away():
    """As in `carat info tiny | head -0`: no traceback, and none at exit either."""
    with subprocess.Popen(
        [sys.executable, "-m", "carat_jax.cli", "info", "tiny"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={"PYTHONPATH": ":".join(filter(None, sys.path)), "JAX_PLATFORMS": "cpu"},
        text=True,
    ) as command:
        command.stdout.close()
        assert command.stderr.read() == ""
    assert command.returncode == 1


# --- chat ----------------------------------------------------------------------------------------


def test_chat_answers_line_by_line(capsys, folder, monkeypatch):
    ran = run(capsys, "chat", "--model", folder, stdin="Q\nR\n\nS\n", monkeypatch=monkeypatch)
    assert ran == (0, "Hi!\nHi!\n", "")
    ran = run(capsys, "chat", "--model", folder, stdin="Q", monkeypatch=monkeypatch)
    assert ran == (0, "Hi!\n", "")


def test_chat_hands_the_conversation_on(capsys, folder, monkeypatch):
    seen = []
    prompt = carat.Gemma.chat_prompt

    def record(self, messages, **options):
        seen.append([dict(message) for message in messages])
        return prompt(self, messages, **options)

    monkeypatch.setattr(carat.Gemma, "chat_prompt", record)
    argv = ["chat", "--model", folder, "--system", "S", "--stop", "!"]
    run(capsys, *argv, stdin="Q\nR\n", monkeypatch=monkeypatch)
    first = [{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}]
    then = [{"role": "assistant", "content": "Hi"}, {"role": "user", "content": "R"}]
    assert seen == [first, first + then]


def test_chat_shows_thinking_apart(capsys, monkeypatch):
    ids = chain("\n", "<|channel>", "thought\n", "um", "<channel|>", "Yes", "<turn|>")
    monkeypatch.setattr(gemma, "load", lambda *_, **__: scripted_model.gemma(ids))
    ran = run(capsys, "chat", "--thinking", stdin="Q\n", monkeypatch=monkeypatch)
    assert ran == (0, "[thinking] um\n\nYes\n", "")


# --- info ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SIZES)
def test_info_of_a_published_size(capsys, name):
    status, out, _ = run(capsys, "info", name, "--batch", "3", "--json")
    printed, config = json.loads(out), PRESETS[name]
    assert status == 0
    assert printed["parameters"] == SIZES[name][0]
    assert printed["weight_bytes"] == 2 * SIZES[name][0]
    assert printed["config"]["hidden_size"] == config.hidden_size
    contexts = [row["context"] for row in printed["contexts"]]
    longest = config.max_position_embeddings
    assert contexts == [n for n in (8192, 32_768, 131_072, 262_144) if n <= longest]
    for row in printed["contexts"]:
        estimate = memory.memory_estimate(config, 3, row["context"])
        assert row["total_bytes"] == estimate
        assert row["state_bytes"] == estimate - printed["weight_bytes"]
        step = memory.step_bytes(config, 3, row["context"])
        assert row["read_bytes_per_step"] == step.total
        assert row["floor_ms"] is None  # of a CPU


def test_info_as_text(capsys, monkeypatch):
    kind = jax.devices()[0].device_kind
    _, out, _ = run(capsys, "info", "31B")
    assert "30,697,345,340 parameters, bfloat16, 61.39 GB of weights" in out
    assert f"this device ({kind}) is not listed" in out
    monkeypatch.setitem(memory.READ_BANDWIDTH, kind, 4.69e12)
    status, out, err = run(capsys, "info", "31B")
    assert (status, err) == (0, "")
    assert "60 (50 sliding with a window of 1024, 10 global)" in out
    table = [line.split() for line in out.splitlines() if line.lstrip()[:1].isdigit()][1:]
    # context, state with rings of 1088, sum, read with 1024 keys, floor
    assert table[0] == ["8,192", "1.31", "62.71", "62.65", "13.36"]
    assert table[2] == ["131,072", "7.60", "69.00", "68.94", "14.70"]
    assert "experts" not in out
    assert "128, 8 for each token" in run(capsys, "info", "26b-a4b")[1]


def test_info_of_a_folder(capsys, folder):
    """A context shorter than the usual ones is shown too, and small sizes in MB."""
    status, out, _ = run(capsys, "info", folder)
    assert status == 0
    assert " MB of weights" in out
    _, out, _ = run(capsys, "info", folder, "--json")
    (row,) = json.loads(out)["contexts"]
    assert row["context"] == 512
    assert row["total_bytes"] == memory.memory_estimate(scripted_model.CONFIG, 1, 512)


def test_info_of_the_bundled_model(capsys):
    status, out, _ = run(capsys, "info", "tiny")
    assert status == 0
    assert out.startswith("tiny: ")


def test_info_plans_for_several_devices(capsys):
    status, out, err = run(capsys, "info", "31b", "--devices", "2")
    assert (status, err) == (0, "")
    assert "61.39 GB of weights" in out and "on 2 devices  30.70 GB of weights each" in out
    assert "batch 1, on each of 2 devices:" in out
    table = [line.split() for line in out.splitlines() if line.lstrip()[:1].isdigit()][1:]
    # Half of what one device has and reads (above), but for 2.7 MB of norms.
    assert table[0] == ["8,192", "0.66", "31.35", "31.33"]
    printed = json.loads(run(capsys, "info", "31b", "--devices", "8", "--json")[1])
    assert printed["devices"] == 8
    assert printed["weight_bytes"] == 2 * SIZES["31b"][0] > 7.8 * printed["weight_bytes_per_device"]


@pytest.mark.parametrize(("devices", "told"), [("3", "num_attention_heads 32"), ("0", "0 devices")])
def test_info_of_devices_that_cannot_be(capsys, devices, told):
    assert told in fails_in_one_line(capsys, "info", "31b", "--devices", devices)


def test_more_devices_than_there_are(capsys, folder):
    message = fails_in_one_line(capsys, "generate", "a", "--model", folder, "--devices", "64")
    assert "takes 64 devices, and there are" in message


def test_info_of_no_rows(capsys):
    assert "batch 0" in fails_in_one_line(capsys, "info", "31b", "--batch", "0")


# --- convert -------------------------------------------------------------------------------------


def test_convert_and_generate_from_what_it_wrote(capsys, folder, tmp_path):
    target = tmp_path / "new" / "converted"
    status, out, _ = run(capsys, "convert", folder, str(target))
    assert status == 0
    assert out.startswith(f"wrote {target}")
    assert not (target / "model.safetensors").exists()
    assert run(capsys, "generate", "a", "--model", str(target)) == (0, "a bcd\n", "")
    assert "is not an empty folder" in fails_in_one_line(capsys, "convert", folder, str(target))
    assert "give 'tiny'" in fails_in_one_line(capsys, "convert", "nonsense", str(tmp_path / "x"))
    assert not (tmp_path / "x").exists()


# --- bench ---------------------------------------------------------------------------------------


def test_bench_prints_a_table_and_writes_json(capsys, tmp_path, monkeypatch):
    result = {"benchmark": "decode", "rows": [{"ms": 1.5}]}
    seen = []

    def measure(args: argparse.Namespace) -> dict:
        seen.append((args.config, args.batch, args.context, args.dtype))
        return result

    module = ALL["carat bench decode"].get_default("module")
    monkeypatch.setattr(module, "run", measure)
    monkeypatch.setattr(module, "table", lambda given: f"{len(given['rows'])} row")
    file = tmp_path / "new" / "result.json"
    assert run(capsys, "bench", "decode", "--json", str(file)) == (0, "1 row\n", "")
    assert json.loads(file.read_text()) == result
    argv = ["--config", "e2b", "12b", "--batch", "4", "--context", "99", "--dtype", "float32"]
    run(capsys, "bench", "decode", *argv)
    assert seen == [(["31b"], [1, 8], [8192], "bfloat16"), (["e2b", "12b"], [4], [99], "float32")]


# --- The compilation cache -----------------------------------------------------------------------


def test_the_compilation_cache_is_the_users(monkeypatch, tmp_path):
    monkeypatch.undo()  # here it is turned on
    chosen = jax.config.jax_compilation_cache_dir
    try:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        jax.config.update("jax_compilation_cache_dir", None)
        compilation_cache.enable()
        assert jax.config.jax_compilation_cache_dir == str(tmp_path / "carat-jax" / "xla")
        jax.config.update("jax_compilation_cache_dir", str(tmp_path / "mine"))
        compilation_cache.enable()
        assert jax.config.jax_compilation_cache_dir == str(tmp_path / "mine")
    finally:
        jax.config.update("jax_compilation_cache_dir", chosen)
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert compilation_cache.default_folder() == Path.home() / ".cache" / "carat-jax" / "xla"
