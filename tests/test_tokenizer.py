"""The tokenizer against the `tokenizers` library's own decode, on a small Gemma-like vocabulary."""

import json
import string
import subprocess
import sys

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, processors

from carat_jax import tokenizer as tokenizer_module
from carat_jax.tokenizer import StopStrings, Tokenizer

CONTROL = {
    **{0: "<pad>", 1: "<eos>", 2: "<bos>", 3: "<unk>"},
    **{46: "<|tool>", 47: "<tool|>", 48: "<|tool_call>", 49: "<tool_call|>"},
    **{50: "<|tool_response>", 51: "<tool_response|>", 52: '<|"|>', 98: "<|think|>"},
    **{100: "<|channel>", 101: "<channel|>", 105: "<|turn>", 106: "<turn|>"},
}
FIRST_BYTE = 238  # <0x00>
FIRST_TEXT = 494
MERGES = [("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "▁"), ("▁▁", "▁▁"), ("\n", "\n")]
TEXT = [*string.ascii_letters, *string.digits, *string.punctuation, "▁", "\t", "é", "你"]
SIZE = FIRST_TEXT + len(TEXT) + len(MERGES) - 1  # the last merge is id 108


def gemma_like_backend(*, bos: bool = True) -> tokenizers.Tokenizer:
    """Gemma 4's structure and special ids around a vocabulary of single characters."""
    tokens = {i: f"<unused{i}>" for i in range(FIRST_TEXT)} | CONTROL | {4: "<mask>"}
    tokens |= {107: "\n", 108: "\n\n"}
    tokens |= {FIRST_BYTE + i: f"<0x{i:02X}>" for i in range(256)}
    tokens |= dict(enumerate([*TEXT, *(a + b for a, b in MERGES[:-1])], FIRST_TEXT))
    if not bos:
        tokens[2] = "<unused2>"
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={token: i for i, token in tokens.items()},
            merges=MERGES,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    special = [tokens[i] for i in CONTROL]
    backend.add_special_tokens([tokenizers.AddedToken(t, normalized=False) for t in special])
    backend.add_tokens([tokenizers.AddedToken("<mask>", normalized=False)])
    return backend


LIBRARY = gemma_like_backend()
TOKENIZER = Tokenizer(gemma_like_backend())


def byte_ids(text: str) -> list[int]:
    return [FIRST_BYTE + byte for byte in text.encode()]


# Encoding.


def test_attributes_and_ids_by_name(tmp_path):
    path = tmp_path / "tokenizer.json"
    LIBRARY.save(str(path))
    tokenizer = Tokenizer.from_file(path)
    assert tokenizer.vocab_size == SIZE
    assert (tokenizer.pad_id, tokenizer.eos_id, tokenizer.bos_id) == (0, 1, 2)
    assert tokenizer.token_id("<|turn>") == 105
    assert tokenizer.token_id("<start_of_turn>") is None


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("", []),
        ("a b", [FIRST_TEXT, TOKENIZER.token_id("▁"), FIRST_TEXT + 1]),
        (" the", [TOKENIZER.token_id("▁the")]),
        ("<|turn>a<turn|>\n", [105, FIRST_TEXT, 106, 107]),
        ("€", [FIRST_BYTE + 0xE2, FIRST_BYTE + 0x82, FIRST_BYTE + 0xAC]),
        ("a<bos>", [FIRST_TEXT, 2]),
        ("\0", [FIRST_BYTE]),
    ],
)
def test_known_ids(text, ids):
    assert TOKENIZER.encode(text, add_bos=False) == ids
    assert TOKENIZER.encode(text) == [2, *ids]


@pytest.mark.parametrize("post_processor", [False, True])
@pytest.mark.parametrize("written", [0, 1, 2, 5])
@pytest.mark.parametrize("rest", ["", "a", " <bos>"])
def test_exactly_one_bos(post_processor, written, rest):
    backend = gemma_like_backend()
    if post_processor:
        backend.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", 2)]
        )
    tokenizer = Tokenizer(backend)
    text = "<bos>" * written + rest
    rest_ids = tokenizer.encode(rest, add_bos=False)
    assert tokenizer.encode(text) == [2, *rest_ids]
    assert tokenizer.encode(text, add_bos=False) == [2] * written + rest_ids


def test_a_vocabulary_without_bos():
    tokenizer = Tokenizer(gemma_like_backend(bos=False))
    assert tokenizer.bos_id is None
    assert tokenizer.encode("a", add_bos=False) == [FIRST_TEXT]
    with pytest.raises(ValueError, match="add_bos=False"):
        tokenizer.encode("a")


def test_truncation_and_padding_of_the_file_are_not_applied(tmp_path):
    backend = gemma_like_backend()
    backend.enable_truncation(4)
    backend.enable_padding(length=16)
    path = tmp_path / "tokenizer.json"
    backend.save(str(path))
    assert len(Tokenizer.from_file(path).encode("abcdefgh")) == 9


def test_surrogates_are_joined_or_replaced():
    assert TOKENIZER.encode("\ud83d\ude00") == TOKENIZER.encode("😀")
    assert TOKENIZER.decode(TOKENIZER.encode("a\ud83d b")) == "a\ufffd b"
    with pytest.raises(TypeError, match="bytes"):
        TOKENIZER.encode(b"a")


# Decoding.

plain_text = st.text().filter(lambda text: "▁" not in text)  # "▁" is read back as a space


@given(plain_text)
def test_text_comes_back(text):
    ids = TOKENIZER.encode(text, add_bos=False)
    assert TOKENIZER.decode(ids, skip_special=False) == text
    assert LIBRARY.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    "text",
    ["👩‍👩‍👧 🇯🇵", "\t\tx = 1\n\n\n", "    if a  <  b:", "你好，世界", "naïve €5", "<0x41>", "\r\n"],
)
def test_text_comes_back_byte_by_byte_as_well(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text
    assert TOKENIZER.decode(byte_ids(text)) == text


@given(st.lists(st.integers(0, SIZE - 1) | st.integers(FIRST_BYTE, FIRST_TEXT)), st.booleans())
def test_streamed_pieces_join_to_the_decoded_text(ids, skip_special):
    stream = TOKENIZER.stream_decoder(skip_special=skip_special)
    text = "".join([stream.push(token_id) for token_id in ids]) + stream.flush()
    assert text == TOKENIZER.decode(ids, skip_special=skip_special)
    library = LIBRARY.decode(ids, skip_special_tokens=skip_special)
    if "\ufffd" not in text:
        assert text == library
    else:  # the library writes one mark for each byte, and gives up the whole run of bytes
        assert "\ufffd" in library


@given(st.lists(plain_text.map(byte_ids) | st.integers(0, FIRST_BYTE - 1).map(lambda i: [i])))
def test_valid_ids_decode_as_in_the_library(parts):
    ids = [token_id for part in parts for token_id in part]
    for skip_special in (False, True):
        text = TOKENIZER.decode(ids, skip_special=skip_special)
        assert text == LIBRARY.decode(ids, skip_special_tokens=skip_special)


def test_a_character_is_held_until_its_last_byte():
    stream = TOKENIZER.stream_decoder()
    pieces = [stream.push(token_id) for token_id in [*byte_ids("é€😀"), FIRST_TEXT]]
    assert pieces == ["", "é", "", "", "€", "", "", "", "😀", "a"]
    assert stream.flush() == ""


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        (byte_ids("€")[:2], "\ufffd"),
        ([*byte_ids("€")[:2], FIRST_TEXT], "\ufffda"),
        ([FIRST_BYTE + 0xFF, FIRST_TEXT], "\ufffda"),
        ([*byte_ids("€")[:2], *byte_ids("é")], "\ufffdé"),
    ],
)
def test_bytes_that_are_not_utf8(ids, text):
    assert TOKENIZER.decode(ids) == text


def test_only_tokens_marked_special_are_skipped():
    ids = [2, 105, FIRST_TEXT, 4, 106, 1]
    assert TOKENIZER.decode(ids) == "a<mask>" == LIBRARY.decode(ids)
    assert TOKENIZER.decode(ids, skip_special=False) == "<bos><|turn>a<mask><turn|><eos>"


@pytest.mark.parametrize("token_id", [-1, SIZE, 262_144, 2**70])
def test_ids_outside_the_vocabulary(token_id):
    with pytest.raises(ValueError, match=f"{token_id} is not in the vocabulary of {SIZE}"):
        TOKENIZER.decode([2, token_id])
    with pytest.raises(ValueError, match=str(token_id)):
        TOKENIZER.stream_decoder().push(token_id)


def test_a_hole_in_the_vocabulary_is_outside_it():
    vocab = {"<unk>": 0, "a": 7}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    backend.decoder = LIBRARY.decoder
    tokenizer = Tokenizer(backend)
    assert tokenizer.vocab_size == 8
    assert tokenizer.decode([7]) == "a"
    with pytest.raises(ValueError, match="token id 3 "):
        tokenizer.decode([3])


def test_numpy_ids():
    ids = np.array(TOKENIZER.encode("the 你"), np.int32)
    assert TOKENIZER.decode(ids) == "the 你"


# Files.


def test_a_missing_file(tmp_path):
    for path in (tmp_path / "tokenizer.json", tmp_path):
        with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
            Tokenizer.from_file(path)


@pytest.mark.parametrize("content", ["", "{", "[]", "null", "{}", '{"model": {"type": "BPE"}}'])
def test_a_file_that_is_no_tokenizer(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"tokenizer\.json: not a valid"):
        Tokenizer.from_file(path)


def test_a_truncated_file(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(LIBRARY.to_str()[:-100])
    with pytest.raises(ValueError, match="not a valid"):
        Tokenizer.from_file(path)


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        decoders.ByteLevel(),
        decoders.Metaspace(),
        decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()]),
        decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        ),
    ],
)
def test_another_decoder_is_refused(tmp_path, decoder):
    document = json.loads(LIBRARY.to_str())
    document["decoder"] = decoder and json.loads(decoder.__getstate__())
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(document))
    with pytest.raises(ValueError, match=r"tokenizer\.json: not a Gemma tokenizer"):
        Tokenizer.from_file(path)


def test_sizes_have_limits(tmp_path, monkeypatch):
    path = tmp_path / "tokenizer.json"
    LIBRARY.save(str(path))
    monkeypatch.setattr(tokenizer_module, "_MAX_VOCAB", SIZE - 1)
    with pytest.raises(ValueError, match=rf"{SIZE} ids; supported are 1 to {SIZE - 1}"):
        Tokenizer.from_file(path)
    monkeypatch.setattr(tokenizer_module, "_MAX_FILE_BYTES", 1000)
    with pytest.raises(ValueError, match="over the limit of 1,000"):
        Tokenizer.from_file(path)
    with pytest.raises(ValueError, match="0 ids"):
        Tokenizer(tokenizers.Tokenizer(models.BPE()))


def test_no_warning_when_the_process_forks(tmp_path):
    path = tmp_path / "tokenizer.json"
    LIBRARY.save(str(path))
    program = (
        "import os, sys; from carat_jax.tokenizer import Tokenizer\n"
        "tokenizer = Tokenizer.from_file(sys.argv[1])\n"
        "tokenizer.decode(tokenizer.encode('the ' * 10_000))\n"
        "child = os.fork()\n"
        "tokenizer.encode('a')\n"
        "sys.exit(os.waitpid(child, 0)[1] if child else 0)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True
    )
    assert ran.stdout + ran.stderr == ""


# Stop strings.


def emitted(stops: list[str], pieces: list[str]) -> tuple[str, bool]:
    """Everything that is emitted, the flush included, and whether a stop string was met."""
    stop_strings, text, stopped = StopStrings(stops), "", False
    for piece in pieces:
        ready, stopped = stop_strings.push(piece)
        text += ready
    return text + stop_strings.flush(), stopped


pieces_of_text = st.lists(st.text("ab", max_size=4))
some_stops = st.lists(st.text("ab", min_size=1, max_size=4), max_size=3)


@given(st.text("ab", min_size=1, max_size=4), pieces_of_text)
def test_one_stop_string_cuts_where_find_finds_it(stop, pieces):
    text = "".join(pieces)
    start = text.find(stop)
    assert emitted([stop], pieces) == ((text, False) if start < 0 else (text[:start], True))


@given(some_stops, pieces_of_text)
def test_of_several_the_first_to_be_completed_counts(stops, pieces):
    text = "".join(pieces)
    for end in range(len(text) + 1):
        if met := [stop for stop in stops if text[:end].endswith(stop)]:
            assert emitted(stops, pieces) == (text[: end - max(map(len, met))], True)
            return
    assert emitted(stops, pieces) == (text, False)


@given(some_stops, pieces_of_text)
def test_nothing_more_is_held_back_than_a_beginning_of_a_stop_string(stops, pieces):
    stop_strings, text, ready = StopStrings(stops), "", ""
    for piece in pieces:
        text += piece
        more, stopped = stop_strings.push(piece)
        ready += more
        if stopped:
            return
        beginnings = {stop[:n] for stop in stops for n in range(len(stop))} | {""}
        assert text.removeprefix(ready) == max(filter(text.endswith, beginnings), key=len)


def test_a_stop_string_across_tokens():
    stop_strings = StopStrings(["\n\nUser:", "<end>"])
    assert stop_strings.push("Hello\n") == ("Hello", False)
    assert stop_strings.push("\nUse") == ("", False)
    assert stop_strings.push(" it") == ("\n\nUse it", False)
    assert stop_strings.push("\n\nUser: no") == ("", True)
    assert stop_strings.push("more") == ("", True)
    assert stop_strings.flush() == ""


@pytest.mark.parametrize("stops", ["stop", [""], ["a", ""], [None], [1]])
def test_stop_strings_of_another_form_are_refused(stops):
    with pytest.raises(ValueError, match="stop strings must be"):
        StopStrings(stops)
