"""Gemma on a model whose text is known: text, stops, streaming, chat, bad input, what is freed."""

import functools
import gc

import jax
import numpy as np
import pytest
import scripted_model
from fixture_models import FOLDER
from scripted_model import BOS, EOS, ID, SIZE, TOKENIZER, chain

import carat_jax as carat
from carat_jax import compilation_cache, generate
from carat_jax.batch_run import BatchRun
from carat_jax.generation import Stream


def spoken(gemma: carat.Gemma, prompt: str | list[int], **options) -> carat.Generation:
    """What `generate` gives, after checking that `stream` gives the same, piece by piece."""
    whole = gemma.generate(prompt, **options)
    pieces = list(gemma.stream(prompt, **options))
    assert "".join(piece.text for piece in pieces) == whole.text
    assert [token for piece in pieces for token in piece.tokens] == whole.tokens
    assert all(piece.generation is None for piece in pieces[:-1])
    last = pieces[-1].generation
    assert (last.text, last.tokens, last.finish_reason, last.non_finite_step) == (
        whole.text, whole.tokens, whole.finish_reason, whole.non_finite_step,
    )  # fmt: skip
    return whole


# --- Text and how it ends ------------------------------------------------------------------------


def test_a_stop_id_ends_the_text_and_is_the_last_token():
    ids = chain("a", "bcd", "<eos>")
    out = spoken(scripted_model.gemma(ids), "a")
    assert (out.text, out.tokens, out.finish_reason) == ("bcd", ids[1:], "stop")
    assert (out.prompt_tokens, out.thinking, out.non_finite_step) == (2, None, None)
    assert out.tokens[-1] == EOS


def test_max_new_tokens_ends_the_text():
    ids = chain("a", "bcd", "<eos>")
    gemma = scripted_model.gemma(ids)
    for n in (1, 2, 3):
        out = spoken(gemma, "a", max_new_tokens=n)
        assert (out.text, out.tokens, out.finish_reason) == ("bcd"[:n], ids[1 : n + 1], "length")
    out = spoken(gemma, "a", max_new_tokens=4)
    assert (out.tokens, out.finish_reason) == (ids[1:], "stop")


def test_stop_ids_of_the_call_stand_in_for_the_default_ones():
    ids = chain("a", "b", "<turn|>", "cd", "<eos>", "e", "<|tool_response>", "f")
    gemma = scripted_model.gemma(ids)

    def ended(**options) -> tuple[str, int]:
        out = spoken(gemma, "a", max_new_tokens=7, **options)
        return out.text, len(out.tokens)

    assert ended() == ("b", 2)
    assert ended(stop_token_ids=[EOS]) == ("bcd", 5)
    assert ended(stop_token_ids=[ID["<|tool_response>"]]) == ("bcde", 7)
    assert ended(stop_token_ids=[]) == ("bcde", 7)
    assert ended(stop_token_ids=[ID["c"], 0]) == ("b", 3)  # ordinary text, still no part of it
    assert ended(stop_token_ids=[ID["b"]]) == ("", 1)


def test_many_tokens_in_several_calls_of_decode():
    """Three calls; every token but the first of them comes from the loop on the device."""
    ids = chain("a", *range(10, 10 + 150), "<eos>")
    out = spoken(scripted_model.gemma(ids), "a")
    assert out.tokens == ids[1:]
    assert out.finish_reason == "stop"


def test_times():
    gemma = scripted_model.gemma(chain("a", "bcd", "<eos>"))
    for stats in (gemma.generate("a").stats, list(gemma.stream("a"))[-1].generation.stats):
        assert stats.ttft_s > 0
        assert stats.tpot_s > 0
    assert gemma.generate("a", max_new_tokens=1).stats.tpot_s is None


def test_ids_beyond_the_tokenizer_have_no_text():
    ids = chain("a", "b", SIZE - 1, "c", "<eos>")
    out = spoken(scripted_model.gemma(ids), "a")
    assert (out.text, out.tokens) == ("bc", ids[1:])


def test_without_a_tokenizer_ids_go_in_and_come_out():
    ids = chain("a", "bcd", "<eos>")
    gemma = scripted_model.gemma(ids, tokenizer=None)
    out = spoken(gemma, [BOS, ID["a"]])
    assert (out.text, out.tokens, out.finish_reason) == ("", ids[1:], "stop")
    for call in (
        lambda: gemma.generate("a"),
        lambda: gemma.stream("a"),
        lambda: gemma.generate(["a"]),
        lambda: gemma.logits("a"),
        lambda: gemma.generate([1], stop=["b"]),
        lambda: gemma.chat([{"role": "user", "content": "a"}]),
        lambda: gemma.chat_prompt([{"role": "user", "content": "a"}]),
    ):
        with pytest.raises(ValueError, match=r"no tokenizer\.json: give token ids"):
            call()


# --- Loading -------------------------------------------------------------------------------------


@pytest.fixture
def load(monkeypatch):
    """`carat.load` that leaves the user's compilation cache alone."""
    monkeypatch.setattr(compilation_cache, "enable", lambda: None)
    return functools.partial(carat.load, progress=False)


def test_a_folder_without_a_tokenizer(load):
    gemma = load(FOLDER / "dense_31b_like")
    assert gemma.tokenizer is None
    assert (gemma.config.dtype, gemma.max_context) == ("float32", 4096)
    assert gemma.options == carat.GenerateOptions(
        temperature=1.0, top_k=64, top_p=0.95, stop_token_ids=[1, 106, 50]
    )
    assert repr(gemma) == "Gemma(12 layers, hidden_size 64, float32, max_context 4096)"


def test_a_whole_folder(load, tmp_path):
    """The text of the written model, and the empty thought that models of this kind do without."""
    folder = scripted_model.write(tmp_path, chain("a", "bcd", "<eos>"))
    gemma = load(str(folder), max_context=300)
    assert gemma.generate("a").text == "bcd"
    assert gemma.max_context == 300
    assert gemma.chat_prompt(USER)[-1] == ID["\n"]
    (folder / "chat_template.jinja").write_text("<bos>{{ messages[0].content }}!")
    assert load(folder).chat_prompt(USER) == [BOS, ID["Q"], ID["!"]]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", None])
def test_the_dtype_that_is_asked_for(load, dtype):
    gemma = load(FOLDER / "dense_31b_like", dtype=dtype)
    expected = jax.numpy.dtype(dtype or "float32")
    assert gemma.config.dtype == expected.name
    assert {leaf.dtype for leaf in jax.tree.leaves(gemma.params)} == {expected}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"max_context": 0}, "max_context = 0: it must be an integer from 1 to"),
        ({"max_context": -1}, "max_context = -1"),
        ({"max_context": 4097}, "max_position_embeddings 4,096"),
        ({"max_context": 100.5}, "max_context = 100.5"),
        ({"max_context": True}, "max_context = True"),
        ({"dtype": "float16"}, "float16"),
        ({"dtype": "nonsense"}, "nonsense"),
    ],
    ids=str,
)
def test_options_of_load_that_do_not_fit(load, options, told):
    with pytest.raises(ValueError, match=told):
        load(FOLDER / "dense_31b_like", **options)


# --- Prompts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["a", "<bos>a", "<bos><bos>a"])
def test_text_gets_exactly_one_bos(text):
    gemma = scripted_model.gemma(chain("a", "b", "<eos>"))
    assert gemma.generate(text).prompt_tokens == 2
    np.testing.assert_array_equal(gemma.logits(text), gemma.logits([BOS, ID["a"]]))
    assert gemma.generate("<bos>", max_new_tokens=1).prompt_tokens == 1


@pytest.mark.parametrize(
    "ids", [[ID["a"]], [BOS, BOS, ID["a"]], [ID["a"]] * 5, (BOS, ID["a"]), range(2, 5)]
)
def test_ids_are_taken_as_they_are(ids):
    gemma = scripted_model.gemma(chain("a", "b", "<eos>"))
    assert gemma.generate(ids).prompt_tokens == len(ids)


def test_every_way_to_give_ids():
    gemma = scripted_model.gemma(chain("a", "b", "<eos>"))
    ids = [BOS, ID["a"]]
    for given in (np.array(ids), np.array(ids, np.uint16), jax.numpy.array(ids), tuple(ids),
                  list(np.array(ids)), list(jax.numpy.array(ids))):  # fmt: skip
        assert gemma.generate(given).text == "b"


def test_a_list_gives_a_list():
    gemma = scripted_model.gemma(chain("a", "bc", "<eos>"))
    ids = [BOS, ID["a"]]
    for batch in (["a"], [ids], [np.array(ids)], np.array([ids]), ("a",)):
        (out,) = gemma.generate(batch)
        assert out.text == "bc"
    texts = [out.text for out in gemma.generate(["b", np.array(ids)], logprobs=True)]
    assert texts == ["c", "bc"]
    with pytest.raises(ValueError, match="stream takes one prompt"):
        gemma.stream(["a"])
    with pytest.raises(ValueError, match="logits takes one prompt"):
        gemma.logits(["a"])


# --- UTF-8 and stop strings ----------------------------------------------------------------------


def test_streaming_holds_back_incomplete_utf_8():
    gemma = scripted_model.gemma(chain("a", "b€😀c", "<eos>"))
    assert spoken(gemma, "a").text == "b€😀c"
    texts = [piece.text for piece in gemma.stream("a")]
    assert texts == ["b", "", "", "€", "", "", "", "😀", "c", ""]


def test_a_character_that_is_never_completed():
    gemma = scripted_model.gemma(chain("a", "b", "<0xE2>", "<0x82>", "<eos>"))
    assert spoken(gemma, "a").text == "b\ufffd"
    assert spoken(gemma, "a", max_new_tokens=2).text == "b\ufffd"


THE = chain("a", "x", "▁the", "yz", "<eos>")  # "x they" and "z": a token of four characters


@pytest.mark.parametrize(
    ("stop", "text", "tokens"),
    [
        (["z"], "x they", 4),
        (["they"], "x ", 3),  # across two tokens
        (["x the"], "", 2),  # at the very start
        (["x"], "", 1),
        (["yz"], "x the", 4),  # at the very end
        (["h"], "x t", 2),  # inside a token
        (["hey", "they z", "ey"], "x t", 3),  # of those that end together the longest
        (["the", "x theyz"], "x ", 2),  # the first to be complete
        (["theyx", "yzz", "aaa"], "x theyz", 5),  # beginnings only: all is let go
        (["<eos>"], "x theyz", 5),  # special tokens are no text
        (["Z", "z"], "x they", 4),
    ],
    ids=str,
)
def test_stop_strings(stop, text, tokens):
    out = spoken(scripted_model.gemma(THE), "a", stop=stop)
    assert (out.text, out.finish_reason) == (text, "stop")
    assert out.tokens == THE[1 : tokens + 1]


def test_a_stop_string_that_does_not_come():
    out = spoken(scripted_model.gemma(THE), "a", stop=["theyz!"], max_new_tokens=4)
    assert (out.text, out.finish_reason) == ("x theyz", "length")


def test_streaming_holds_back_what_may_become_a_stop_string():
    pieces = list(scripted_model.gemma(THE).stream("a", stop=["they!"]))
    assert [piece.text for piece in pieces] == ["x", " ", "", "theyz", ""]
    assert [piece.tokens for piece in pieces] == [[token] for token in THE[1:]]


def test_a_stop_string_in_one_row_leaves_the_others_alone():
    """The row that is cut gets what it gets alone, however long the others go on."""
    long = chain("A", *range(10, 10 + 150), "<eos>")
    gemma = scripted_model.gemma(chain("a", "bcd", "<eos>"), long)
    for stop in ("b", "c", "d"):
        cut, other = gemma.generate(["a", "A"], stop=[stop], logprobs=True)
        alone = gemma.generate("a", stop=[stop])
        assert (cut.text, cut.tokens) == (alone.text, alone.tokens)
        assert len(cut.logprobs) == len(cut.tokens)
        assert (cut.top_logprobs, alone.logprobs) == (None, None)  # only where asked for
        assert cut.finish_reason == "stop"
        assert stop not in cut.text
        assert other.tokens == long[1:][: len(other.tokens)]


# --- NaN in the logits ---------------------------------------------------------------------------


@pytest.mark.parametrize("step", [0, 1, 3, 70])
def test_nan_ends_the_generation_with_its_step(step):
    """The logits after the token at `step - 1` are damaged: that many tokens could be chosen."""
    ids = chain("a", *range(10, 10 + 80), "<eos>")
    gemma = scripted_model.gemma(ids, damaged=[ids[step]])
    out = spoken(gemma, "a", max_new_tokens=100)
    assert (out.finish_reason, out.non_finite_step) == ("non_finite", step)
    assert out.tokens == ids[1 : step + 1]


def test_nan_in_one_row_leaves_the_others_alone():
    first, second = chain("a", "bcd", "<eos>"), chain("A", "BCD", "<eos>")
    gemma = scripted_model.gemma(first, second, damaged=[ID["B"]])
    good, bad = gemma.generate(["a", "A"], logprobs=True)
    assert (good.text, good.finish_reason) == ("bcd", "stop")
    assert np.isfinite(good.logprobs).all()
    assert (bad.text, bad.finish_reason, bad.non_finite_step) == ("B", "non_finite", 1)
    assert len(bad.logprobs) == len(bad.tokens) == 1
    assert np.isfinite(bad.logprobs).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_damaged_weights_end_every_row_at_once(value):
    gemma = scripted_model.gemma(chain("a", "bcd", "<eos>"))
    table = np.array(gemma.params["embed_tokens"])
    table[ID["z"], 0] = value  # a logit of every row, since the table is the head as well
    gemma.params["embed_tokens"] = jax.numpy.asarray(table)
    gemma.params["norm"] = gemma.params["norm"] + 0.5 * np.ones(SIZE, np.float32)
    for out in gemma.generate(["a", "b"], logprobs=True):
        assert (out.tokens, out.finish_reason, out.non_finite_step) == ([], "non_finite", 0)


def test_nan_with_a_stop_string_held_back():
    ids = chain("a", "bcd", "<eos>")
    out = spoken(scripted_model.gemma(ids, damaged=[ID["c"]]), "a", stop=["cx"])
    assert (out.text, out.finish_reason, out.non_finite_step) == ("bc", "non_finite", 2)


# --- Chat ----------------------------------------------------------------------------------------

USER = [{"role": "user", "content": "Q"}]


def test_a_chat_prompt_has_one_bos_and_opens_the_reply():
    text = "<bos><|turn>user\nQ<turn|>\n<|turn>model\n"
    assert scripted_model.gemma().chat_prompt(USER) == TOKENIZER.encode(text, add_bos=False)


@pytest.mark.parametrize(
    ("reply", "thinking", "text"),
    [
        (["Yes", "<turn|>"], None, "Yes"),
        (["<|channel>", "thought\n", "um", "<channel|>", "Yes", "<turn|>"], "um", "Yes"),
        (["<|channel>", "thought\n", "<channel|>", "Yes", "<turn|>"], "", "Yes"),
        (["<|channel>", "thought\n", "um", "<turn|>"], "um", ""),
        (["<|channel>", "thought\n", "um", "<channel|>", "<turn|>"], "um", ""),
        (["<|channel>", "thought\n", SIZE - 1, "<channel|>", "Yes", "<turn|>"], "", "Yes"),
    ],
    ids=["absent", "whole", "empty", "truncated", "no_answer", "an_id_without_text"],
)
def test_chat_takes_thinking_and_answer_apart(reply, thinking, text):
    ids = chain("\n", *reply)
    out = scripted_model.gemma(ids).chat(USER, thinking=True)
    assert (out.thinking, out.text) == (thinking, text)
    assert out.tokens == ids[1:]
    assert out.finish_reason == "stop"
    assert out.prompt_tokens == len(scripted_model.gemma().chat_prompt(USER, thinking=True))


def test_chat_takes_the_options_of_generate():
    ids = chain("\n", "<|channel>", "thought\n", "um", "<channel|>", "Yes!", "<turn|>")
    gemma = scripted_model.gemma(ids)
    assert gemma.chat(USER, max_new_tokens=2).finish_reason == "length"
    assert gemma.chat(USER, stop=["s!"]).text == "Ye"
    cut = gemma.chat(USER, stop=["m"])
    assert (cut.thinking, cut.text, cut.finish_reason) == ("u", "", "stop")
    ended = gemma.chat(USER, stop_token_ids=[ID["e"]])  # as in `generate`, no part of the text
    assert (ended.thinking, ended.text) == ("um", "Y")
    with pytest.raises(ValueError, match="no messages"):
        gemma.chat([])


def test_chat_answers_users_and_tools_only():
    gemma = scripted_model.gemma()
    for role in ("assistant", "model"):
        with pytest.raises(
            ValueError, match=f"last message has role '{role}': .* next user message"
        ):
            gemma.chat([*USER, {"role": role, "content": "So"}])


# --- Bad input -----------------------------------------------------------------------------------


def compilations() -> int:
    return sum(
        f._cache_size() for f in (generate.prefill_chunk, generate._begin_jit, generate.decode)
    )


def live_arrays() -> set[int]:
    return {id(array) for array in jax.live_arrays()}


def assert_no_more_live(before: set[int]) -> None:
    if live_arrays() - before:
        gc.collect()  # only if need be: it takes longer than most of these tests
    assert live_arrays() <= before


@pytest.mark.parametrize(
    ("prompt", "options", "told"),
    [
        ("", {}, "empty prompt"),
        ([], {}, "empty prompt"),
        (np.array([], int), {}, "empty prompt"),
        ([[]], {}, "empty prompt"),
        (["a", ""], {}, "empty prompt"),
        ([[5], []], {}, "empty prompt"),
        ((), {}, "empty prompt"),
        (np.zeros((0, 4), int), {}, "prompt"),
        (None, {}, "NoneType"),
        (7, {}, "int"),
        (np.int32(7), {}, r"7.*in place of a prompt: give a string, or a list of ids"),
        (["a", 5], {}, r"^5 \(int\) in place of a prompt"),
        ([[5], None], {}, r"None \(NoneType\) in place of a prompt"),
        (USER, {}, "prompt is a list of messages: give them to `chat`"),
        ([USER, USER], {}, "prompt is a list of messages: give them to `chat`"),
        ({5: 6}, {}, "dict"),
        (b"abc", {}, r"prompt is bytes: give a string, `prompt\.decode\(\)`"),
        (["a", b"abc"], {}, "prompt is bytes"),
        ([5, -1], {}, "prompt id -1: ids go from 0 to 383"),
        ([5, SIZE], {}, "prompt id 384"),
        ([2**40], {}, f"prompt id {2**40}"),
        ([2**70], {}, f"prompt id {2**70}"),
        ([[5], [SIZE]], {}, "prompt id 384"),
        ([5, 6.0], {}, "float64: they must be integers"),
        ([True, False], {}, "bool: they must be integers"),
        (np.array([0.5]), {}, "float64"),
        ([5, None], {}, r"None \(NoneType\) among the ids of a prompt: they must be integers"),
        ([5, "a"], {}, r"'a' \(str\) among the ids of a prompt"),
        ([[[5]]], {}, "nested"),
        ([[5, [6]]], {}, "nested"),
        ("a" * 512, {"max_new_tokens": 1}, "max_context 512: give a shorter prompt$"),
        (
            [5],
            {"max_new_tokens": 512},
            "prompt 1 + 512 new tokens exceeds max_context 512: "
            "give max_new_tokens of at most 511 or a shorter prompt$",
        ),
        ([[5], [5] * 100], {"max_new_tokens": 413}, "prompt 100 + 413"),
        (
            [5] * 300,
            {},
            r"300 + 256 new tokens \(the default of max_new_tokens\) exceeds .* most 212",
        ),
        ("a", {"max_new_tokens": 10**9}, "1,000,000,000 new tokens"),
        ("a", {"max_new_tokens": 0}, "max_new_tokens = 0"),
        ("a", {"max_new_tokens": -5}, "max_new_tokens = -5"),
        ("a", {"temperature": float("nan")}, "temperature = nan"),
        ("a", {"temperature": -1}, "temperature = -1"),
        ("a", {"temperature": float("inf")}, "temperature = inf"),
        ("a", {"top_p": 0}, "top_p = 0"),
        ("a", {"top_p": 1.5}, "top_p = 1.5"),
        ("a", {"top_p": float("nan")}, "top_p = nan"),
        ("a", {"top_k": -1}, "top_k = -1"),
        ("a", {"min_p": 2}, "min_p = 2"),
        ("a", {"seed": -1}, "seed = -1"),
        ("a", {"seed": [1, 2]}, "2 seeds for 1 prompts"),
        (["a", "b"], {"seed": [1]}, "1 seeds for 2 prompts"),
        ("a", {"seed": []}, "0 seeds"),
        ("a", {"stop": [""]}, "stop has ''"),
        ("a", {"stop_token_ids": [SIZE]}, "stop_token_ids has 384"),
        ("a", {"suppress_tokens": range(SIZE)}, "leaves no token"),
        ("a", {"logprobs": 129}, "logprobs = 129"),
        ("a", {"best_of": 2}, "no option 'best_of'"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_bad_input_is_refused_before_anything_is_compiled(prompt, options, told):
    gemma = scripted_model.gemma()
    compiled, arrays = compilations(), live_arrays()
    single = not isinstance(prompt, list) or not isinstance((prompt or [0])[0], str | list)
    for call in (gemma.generate, gemma.stream) if single else (gemma.generate,):
        with pytest.raises(ValueError, match=told.replace(" + ", r" \+ ")) as refused:
            call(prompt, **options)
        assert "\n" not in str(refused.value)
        del refused
    assert compilations() == compiled
    assert_no_more_live(arrays)


def test_the_last_token_of_the_context_can_be_filled():
    gemma = scripted_model.gemma(chain("a", "b", "<eos>"))
    out = spoken(gemma, [ID["a"]] * 500, max_new_tokens=12, stop_token_ids=[])
    assert out.tokens == [ID["b"], EOS] + [EOS] * 10
    gemma.max_context = 64
    with pytest.raises(
        ValueError, match=r"at most 62 or a shorter prompt or a larger max_context$"
    ):
        gemma.generate("a")
    gemma.max_context = 512
    with pytest.raises(ValueError, match="513 tokens exceed max_context 512"):
        gemma.logits([5] * 513)


# --- What is freed -------------------------------------------------------------------------------


@pytest.fixture
def states(monkeypatch) -> list[jax.Array]:
    """Every array of a state that is made while the test runs."""
    kept: list[jax.Array] = []

    def keep(name: str) -> None:
        made = getattr(generate, name)

        def wrapped(*args, **kwargs):
            result = made(*args, **kwargs)
            kept.extend(jax.tree.leaves(result[1]))
            return result

        monkeypatch.setattr(generate, name, wrapped)

    for name in ("prefill_chunk", "begin", "decode"):
        keep(name)
    return kept


def assert_freed(states: list[jax.Array]) -> None:
    assert states
    assert all(array.is_deleted() for array in states)


@pytest.fixture
def talker() -> carat.Gemma:
    return scripted_model.gemma(chain("a", *range(10, 10 + 150), "<eos>"))


def test_a_generation_leaves_nothing_on_the_device(talker, states):
    before = live_arrays()
    talker.generate("a")
    list(talker.stream("a"))
    assert_freed(states)
    states.clear()
    assert_no_more_live(before)


def test_a_stream_that_is_closed(talker, states):
    before = live_arrays()
    pieces = talker.stream("a")
    assert isinstance(pieces, Stream)  # which a notebook prints live
    for _ in range(3):
        next(pieces)
    assert not all(array.is_deleted() for array in states)
    pieces.close()
    assert_freed(states)
    states.clear()
    assert_no_more_live(before)


def test_a_stream_that_is_never_started(talker):
    before, compiled = live_arrays(), compilations()
    pieces = talker.stream("a")
    assert compilations() == compiled
    pieces.close()
    del pieces
    assert_no_more_live(before)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_stream_that_is_left_by_an_exception(talker, states, error):
    """Even while the traceback is kept, as notebooks do."""

    def leave() -> None:
        for _ in talker.stream("a"):
            raise error

    with pytest.raises(error) as kept:
        leave()
    assert_freed(states)
    assert kept.tb is not None


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["prefill_chunk", "begin", "decode", "collect"])
@pytest.mark.parametrize("way", ["generate", "stream"])
def test_an_exception_inside(talker, states, monkeypatch, way, where, error):
    """As Ctrl-C would: whatever the state's arrays are at that time, they are gone."""

    def fail(*args, **kwargs):
        states.extend(jax.tree.leaves([a for a in args if type(a).__name__.endswith("State")]))
        raise error

    if where == "collect":
        monkeypatch.setattr(BatchRun, "_collect", fail)
    else:
        monkeypatch.setattr(generate, where, fail)
    before = live_arrays()
    with pytest.raises(error) as kept:
        talker.generate("a") if way == "generate" else list(talker.stream("a"))
    assert_freed(states)
    states.clear()
    del kept
    assert_no_more_live(before)


def test_calls_are_independent(talker):
    """Two streams in turns, and a generation between them."""
    expected = talker.generate("a").tokens
    first, second = talker.stream("a"), talker.stream("a")
    tokens = [[], []]
    for one, other in zip(first, second, strict=True):
        tokens[0] += one.tokens
        tokens[1] += other.tokens
        assert talker.generate("a", max_new_tokens=2).tokens == expected[:2]
    assert tokens == [expected, expected]
