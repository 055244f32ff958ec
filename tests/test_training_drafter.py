"""Training of assistant drafters: rounds in parallel against rounds in use, the loss, resuming."""

import dataclasses
import functools
import itertools
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_model
import tokenizers
from fixture_models import FOLDER, Model, empty, model

import carat_jax as carat
from carat_jax.chat import ChatFormat
from carat_jax.model import forward, hidden_states
from carat_jax.options import GenerateOptions
from carat_jax.speculative import Target
from carat_jax.speculative.drafters.assistant import Assistant, AssistantModel, Scores
from carat_jax.speculative.drafters.assistant_checkpoint import load_assistant
from carat_jax.speculative.drafters.assistant_config import AssistantConfig
from carat_jax.tokenizer import Tokenizer
from carat_jax.training import corpus, export, loop, tokenizer_training
from carat_jax.training import drafter as command
from carat_jax.training.checkpoints import Checkpoints
from carat_jax.training.distillation import Distillation, compare_row, read_target, unroll
from carat_jax.training.initial import initial_params
from carat_jax.training.own_text import Texts, Writer

ASSETS = Path(carat.__file__).parent / "assets" / "tiny" / "drafter"
TARGETS = {"drafter_dense": "dense_31b_like", "drafter_e2b": "e2b_like"}
K = 4


@functools.cache
def pair(name: str) -> tuple[Assistant, Model]:
    m = model(TARGETS[name])
    return load_assistant(FOLDER / name, m.config), m


# --- Rounds in parallel --------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames="config")
def in_parallel(
    assistant: Assistant, params: dict, config: carat.GemmaConfig, tokens: jax.Array
) -> tuple[jax.Array, Scores]:
    """y and scores [B, K, T - K, ...] of the rounds after each position of tokens [B, T]."""
    hidden, lent = read_target(params, config, tokens)
    embedded = params["embed_tokens"][tokens] * carat.model.embedding_scale(config)
    y = unroll(assistant.config, assistant.params, embedded, hidden, lent, K)
    bound = AssistantModel(assistant.config).bind({"params": assistant.params})
    return y, bound.scores(y, assistant.token_ordering)


class Recording(Assistant):
    """Keeps the scores from which it takes its proposals, while `propose` is traced."""

    def draft(self, target: Target, token: jax.Array, hidden: jax.Array) -> tuple:
        scores, hidden = super().draft(target, token, hidden)
        RECORDED.append(scores)
        return scores, hidden


RECORDED: list[Scores] = []


@functools.partial(jax.jit, static_argnames="config")
def in_use(
    assistant: Assistant,
    params: dict,
    config: carat.GemmaConfig,
    tokens: jax.Array,
    state: carat.KVState,
    lengths: jax.Array,
) -> tuple[jax.Array, Scores]:
    """A round of each row on the state after its first tokens: proposals, scores [B, K, ...]."""
    hidden, kv = hidden_states(params, config, tokens, state, new=lengths)
    rows = jnp.arange(len(lengths))
    target = Target(params, config, kv, tokens[rows, lengths], hidden[rows, lengths - 1])
    RECORDED.clear()
    fields = {f.name: getattr(assistant, f.name) for f in dataclasses.fields(assistant)}
    proposal, _ = Recording(**fields).propose(None, target, K, None)
    return proposal.tokens, jax.tree.map(lambda *x: jnp.stack(x, axis=1), *RECORDED)


@pytest.mark.parametrize(
    "name", ["drafter_dense", pytest.param("drafter_e2b", marks=pytest.mark.slow)], scope="session"
)
def test_every_step_of_a_round_is_the_one_in_use(name):
    """Each text has, after its first tokens, what the drafter proposes there in use.

    Lengths at and around the window (16) and the slots of the rings (64), which have wrapped; one
    is that of the round which Hugging Face transformers gave.
    """
    assistant, m = pair(name)
    lengths = np.array([1, 2, 3, 14, 15, 16, 17, 18, 31, 32, 33, 50, 63, 64, 65, 66, 80, 85])
    tokens = np.tile(m.ids, (len(lengths), 1))
    proposals, used = in_use(
        assistant, m.params, m.config, tokens, empty(m, len(lengths)), jnp.asarray(lengths)
    )
    rows = np.arange(len(lengths))
    texts = tokens.copy()
    texts[rows[:, None], lengths[:, None] + 1 + np.arange(K)] = proposals
    y, scores = in_parallel(assistant, m.params, m.config, texts)
    y, scores = jax.tree.map(lambda x: x[rows, :, lengths - 1], (y, scores))
    logits, expected = (over_vocabulary(x, m.config.vocab_size) for x in (scores, used))
    np.testing.assert_allclose(logits, expected, rtol=0, atol=2e-4)  # of numbers up to 20
    top = np.sort(used.logits, axis=-1)
    clear = top[..., -1] - top[..., -2] > 1e-3
    assert clear.mean() > 0.95
    np.testing.assert_array_equal(scores.best()[clear], proposals[clear])

    with np.load(FOLDER / name / "expected.npz") as stored:
        row = list(lengths).index(stored["kv_len"])
        assert m.ids[lengths[row]] == stored["bonus_id"]
        np.testing.assert_array_equal(scores.best()[row], stored["ref_ids"])
        np.testing.assert_allclose(y[row], stored["ref_hidden"], rtol=0, atol=5e-4)


def over_vocabulary(scores: Scores, vocab_size: int) -> np.ndarray:
    """[..., V], NaN where a token is not scored."""
    if scores.ids is None:
        return np.asarray(scores.logits)
    logits = np.full((*scores.logits.shape[:-1], vocab_size), np.nan)
    np.put_along_axis(logits, np.asarray(scores.ids), np.asarray(scores.logits), axis=-1)
    return logits


# --- The loss ------------------------------------------------------------------------------------


def test_sums_against_float64():
    draw = np.random.default_rng(0)
    T, V, first, last = 12, 7, 2, 10
    logits, guesses = 3 * draw.standard_normal((T, V)), 3 * draw.standard_normal((K, T - K, V))
    tokens = draw.integers(0, V, T + 1)
    for t in range(3, 6):  # some guesses of each step are right
        guesses[:, t, :] = -5.0
        guesses[np.arange(K), t, tokens[t + 2 : t + 2 + K]] = 5.0

    def softmax(x: np.ndarray) -> np.ndarray:
        e = np.exp(x - x.max())
        return e / e.sum()

    expected = np.zeros((4, K))
    for t, i in itertools.product(range(T - K), range(K)):
        if t < first or t + i + 2 > last:
            continue
        p, q = softmax(logits[t + i + 1]), softmax(guesses[i, t])
        right = [guesses[j, t].argmax() == tokens[t + j + 2] for j in range(i + 1)]
        divergence = np.sum(p * (np.log(p) - np.log(q)))
        expected[:, i] += 1, divergence, p.argmax() == q.argmax(), all(right)
    text = Texts(jnp.asarray(tokens), jnp.int32(first), jnp.int32(last))
    sums = compare_row(jnp.float32(logits), jnp.float32(guesses), text)
    assert expected[3].all() and (expected[3] < expected[0]).all()
    for got, wanted in zip(
        (sums.rounds, sums.loss, sums.agreed, sums.accepted), expected, strict=True
    ):
        np.testing.assert_allclose(got, wanted, rtol=2e-6)


# --- Training ------------------------------------------------------------------------------------

WINDOW = 24
OPTIONS = loop.TrainingOptions(seconds=1.0, batch=4, window=WINDOW, learning_rate=2e-2)
OWN = command.DrafterOptions(num_proposals=2, own_texts=64, hidden_size=16, intermediate_size=16)
CONFIG = dataclasses.replace(small_model.CONFIG, vocab_size=700)  # with room for a tokenizer
SHAPE = AssistantConfig.for_target(CONFIG, hidden_size=16, intermediate_size=16)
SOURCE = Path(command.__file__).read_text(encoding="utf-8")
TEXT = corpus.Corpus(training={"drafter.py": SOURCE}, held_out={"part.py": SOURCE[:1500]})


@functools.cache
def target() -> tuple[carat.Gemma, tokenizers.Tokenizer]:
    """A model with random weights, and its tokenizer."""
    backend = tokenizer_training.train_tokenizer([SOURCE], CONFIG.vocab_size)
    params = carat.init_params(CONFIG, jax.random.key(0))
    chat_format = ChatFormat(empty_thought=True)
    options = GenerateOptions(temperature=1.0, top_k=3, stop_token_ids=(1,))
    return carat.Gemma(CONFIG, params, Tokenizer(backend), chat_format, options, 256), backend


def make_task(folder: Path) -> Distillation:
    return command.make_task(*target(), TEXT, OPTIONS, OWN, SHAPE, folder)


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Distillation:
    return make_task(tmp_path_factory.mktemp("texts"))


def silent(gone: float, point: loop.Point) -> None:
    pass


def train(
    task: Distillation, folder: Path, report: Callable[[float, loop.Point], None] = silent
) -> loop.Trained:
    """Eight calls of equal time, ten steps each, which all report; checkpoints after three."""
    params = initial_params(Assistant.abstract(SHAPE).params, SHAPE.text.num_hidden_layers, 0)
    with Checkpoints(folder, {"batch": OPTIONS.batch}, every=3 / 8) as checkpoints:
        return loop.train(
            params,
            task,
            OPTIONS,
            report,
            checkpoints=checkpoints,
            clock=functools.partial(next, itertools.count(0.0, 1 / 8)),
        )


@pytest.fixture(scope="module")
def whole(task, tmp_path_factory) -> loop.Trained:
    return train(task, tmp_path_factory.mktemp("whole"))


def test_training_lowers_the_loss(whole):
    first, last = whole.curve[0], whole.curve[-1]
    assert whole.steps == last.step == 80
    assert last.held_out_loss < 0.7 * first.held_out_loss
    assert np.mean(last.figures["losses"]) == pytest.approx(last.loss)
    assert last.loss < whole.curve[1].loss
    agreement = [p.held_out_figures["own"]["agreement"][0] for p in (first, last)]
    assert agreement[1] > agreement[0] + 0.1


def test_a_run_that_breaks_off_comes_to_the_same_end(task, whole, tmp_path):
    class Broken(Exception):
        pass

    def report(gone: float, point: loop.Point) -> None:
        if point.step == 60:  # that of 30 was the last one kept
            raise Broken

    with pytest.raises(Broken):
        train(task, tmp_path, report)
    resumed = train(task, tmp_path)
    jax.tree.map(np.testing.assert_array_equal, resumed.params, whole.params)
    assert resumed.curve == whole.curve


@pytest.mark.slow
@pytest.mark.parametrize(("at", "kept"), [(60, {30}), (70, {30, 60})])
def test_a_killed_process_loses_its_last_interval_at_most(task, whole, tmp_path, at, kept):
    """Killed before a checkpoint is begun, and while it may be half written."""
    argv = [sys.executable, __file__, str(tmp_path)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as run:
        for line in run.stdout:
            if line == f"step {at}\n":
                run.kill()
                break
    assert run.returncode == -signal.SIGKILL
    steps = []
    resumed = train(task, tmp_path, lambda gone, point: steps.append(point.step))
    assert steps[0] - 10 in kept
    jax.tree.map(np.testing.assert_array_equal, resumed.params, whole.params)
    assert resumed.curve == whole.curve


def test_a_folder_of_another_run_is_refused(tmp_path):
    with Checkpoints(tmp_path, {"batch": 4, "window": 64}):
        pass
    with (
        pytest.raises(ValueError, match=r"batch = 4, not 8\. .* another --out"),
        Checkpoints(tmp_path, {"batch": 8, "window": 64}),
    ):
        pass


def test_what_cannot_be_trained_is_refused(tmp_path, capsys):
    for field, message in (("own_texts", "at least 1"), ("checkpoint_seconds", "positive")):
        with pytest.raises(ValueError, match=f"{field} = 0: .*{message}"):
            command.DrafterOptions(**{field: 0})
    with pytest.raises(SystemExit):
        command.main(["--out", str(tmp_path / "out"), "--corpus", str(tmp_path)])
    assert "usable Python sources" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


# --- The target's own text -----------------------------------------------------------------------


def test_own_text_is_what_the_model_says(task, tmp_path):
    gemma, stops = target()[0], tuple(range(35))
    options = gemma.options.replace(stop_token_ids=stops)
    writer = Writer(gemma.params, CONFIG, options, WINDOW)
    texts = writer.write(task.stream, 64, 0, tmp_path / "texts")
    assert texts.tokens.shape == (64, WINDOW + 1) and texts.tokens.dtype == np.uint16
    assert (texts.tokens[:, 0] == 2).all()
    assert texts.first.min() == 0 and texts.first.max() == WINDOW // 2 - 1
    logits, _ = jax.jit(forward, static_argnames="config")(
        gemma.params, CONFIG, texts.tokens.astype(np.int32), None
    )
    said = np.take_along_axis(logits[:, :-1], texts.tokens[:, 1:, None].astype(int), axis=-1)
    rank = np.asarray(logits[:, :-1] > said + 1e-4).sum(-1)  # of the token in each column but 0
    prompts = np.asarray(task.stream.tokens).tobytes()
    for row, (tokens, first, last) in enumerate(
        zip(texts.tokens, texts.first, texts.last, strict=True)
    ):
        assert tokens[1 : first + 1].tobytes() in prompts
        assert rank[row, first:].max() <= (0 if row < 32 else 2)  # greedy, or of the top 3
        ends = first + 1 + np.flatnonzero(np.isin(tokens[first + 1 :], stops))
        assert last == (ends[0] if len(ends) else WINDOW)
    assert rank[32:].max() > 0
    assert (texts.last < WINDOW).any() and (texts.last == WINDOW).any()

    (tmp_path / "texts" / "0001.npz").unlink()  # broken off after the first part
    again = writer.write(task.stream, 64, 0, tmp_path / "texts")
    jax.tree.map(np.testing.assert_array_equal, again, texts)


# --- Files ---------------------------------------------------------------------------------------


def test_a_saved_drafter_comes_back(tmp_path):
    config = dataclasses.replace(SHAPE, text=dataclasses.replace(SHAPE.text, dtype="bfloat16"))
    shapes = Assistant.abstract(config).params
    draw = np.random.default_rng(0)
    params = jax.tree.map(lambda x: draw.standard_normal(x.shape).astype(x.dtype), shapes)
    export.save_drafter(tmp_path / "model.safetensors", params, config)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    loaded = load_assistant(tmp_path, dataclasses.replace(CONFIG, dtype="bfloat16"))
    jax.tree.map(np.testing.assert_array_equal, loaded.params, params)


# --- A whole run ---------------------------------------------------------------------------------


def test_a_run_leaves_a_drafter_and_a_log(tmp_path):
    out = tmp_path / "drafter"
    log = command.run(TEXT, *target(), OPTIONS, OWN, out)
    assert {file.name for file in out.iterdir()} == {
        "config.json",
        "model.safetensors",
        "training_curve.png",
        "training_log.json",
    }
    written = (out / "training_log.json").read_text(encoding="utf-8")
    assert json.loads(written) == log
    assert str(tmp_path) not in written and str(Path.home()) not in written
    assert log["tokens"] == log["steps"] * 4 * WINDOW
    assert [len(log["held_out"]["own"][x]) for x in ("losses", "acceptance")] == [2, 2]
    assert log["held_out"]["loss"] == pytest.approx(
        min(p["held_out_loss"] for p in log["curve"] if "held_out_loss" in p), rel=0.02
    )
    assert carat.load_drafter(out, target()[0]).config == SHAPE


# --- The bundled drafter -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gemma() -> carat.Gemma:
    return carat.load("tiny", dtype="float32", progress=False)


@pytest.mark.slow
def test_rounds_of_the_bundled_drafter_are_those_that_training_counts(gemma):
    """Its guesses all over the plain text give the rounds that generating with it has."""
    drafter = carat.load_drafter("tiny", gemma, progress=False)
    prompt = gemma.tokenizer.encode("import os\n\n\ndef ")
    options = {"max_new_tokens": 61, "temperature": 0, "stop_token_ids": []}
    plain = gemma.generate(prompt, **options)
    out = gemma.generate(prompt, drafter=drafter, num_proposals=K, **options)
    assert out.tokens == plain.tokens

    text = np.array([*prompt, *plain.tokens])
    _, scores = in_parallel(drafter, gemma.params, gemma.config, jnp.asarray(text[None]))
    guesses = np.asarray(scores.best()[0])  # [K, T - K]
    at, last, rounds, accepted = len(prompt) - 1, len(text) - 1, 0, np.zeros(K)
    while at + K + 1 < last:
        right = guesses[:, at] == text[at + 2 : at + 2 + K]
        stand = int(np.cumprod(right).sum())
        accepted[:stand] += 1
        rounds, at = rounds + 1, at + stand + 1
    # The last rounds may be cut by the limit.
    assert np.abs(np.array(out.stats.per_position) * out.stats.drafted / K - accepted).max() <= 2
    assert accepted[0] / rounds > 0.6
    assert out.stats.acceptance_length > 2.5


def test_the_bundled_drafter_is_small_and_logged():
    log = json.loads((ASSETS / "training_log.json").read_text(encoding="utf-8"))
    assert sum(file.stat().st_size for file in ASSETS.iterdir()) <= 2e6
    config = AssistantConfig.from_json(ASSETS)
    leaves = jax.tree.leaves(Assistant.abstract(config).params)
    assert log["model"]["parameters"] == sum(leaf.size for leaf in leaves)
    assert "PSF" in log["corpus"]["licence"]
    first, *_, last = log["held_out"]["own"]["acceptance"]
    assert first > 0.8 and last > 0.55
    assert log["held_out"]["loss"] < 0.4


def test_a_wrong_name_is_told_what_there_is(gemma):
    with pytest.raises(FileNotFoundError, match=r"no drafter 'tinny'.*'ngram'.*'tiny'.*folder"):
        carat.load_drafter("tinny", gemma)


if __name__ == "__main__":  # the process that is killed

    def say(gone: float, point: loop.Point) -> None:
        print(f"step {point.step}", flush=True)
        if point.step in (50, 60, 80):  # the checkpoint is written meanwhile, or this killed
            time.sleep(2)

    train(make_task(Path(sys.argv[1]) / "texts"), Path(sys.argv[1]), say)
