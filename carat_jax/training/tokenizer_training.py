"""A small BPE tokenizer of Gemma 4's own structure, trained on given text.

Ids 0 to 493 are Gemma 4's: special tokens, unused slots, runs of newlines and of spaces, the 256
bytes. Learned pieces follow, and single characters come last. What Gemma leaves to its
merges alone holds here too: no piece mixes newlines with anything else or has a space inside, and
digits stay single.
"""

import json
from collections.abc import Iterable

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

SPECIAL_TOKENS = {
    0: "<pad>",
    1: "<eos>",
    2: "<bos>",
    3: "<unk>",
    4: "<mask>",
    46: "<|tool>",
    47: "<tool|>",
    48: "<|tool_call>",
    49: "<tool_call|>",
    50: "<|tool_response>",
    51: "<tool_response|>",
    52: '<|"|>',
    98: "<|think|>",
    100: "<|channel>",
    101: "<channel|>",
    105: "<|turn>",
    106: "<turn|>",
}
FIRST_NEWLINES, FIRST_SPACES, FIRST_BYTE, FIRST_LEARNED = 107, 138, 238, 494
LONGEST_RUN = 31
SPACE = "▁"
_FIRST_UNUSED = 6  # the slot that Gemma calls <unused0>
_ALPHABET = ["\t", *map(chr, range(ord("!"), ord("~") + 1)), SPACE]  # all else is spelt in bytes

# How text is cut before pieces are learned: a word, with a leading "_" or "." if it has one (3 %
# fewer tokens for Python than without), or a run of punctuation; either may begin with one space.
# The finished tokenizer needs no such cuts: what no learned piece spans, no merge can produce.
_WORDS = r"▁?[_.]?[A-Za-z]+|▁?((?![_.][A-Za-z])[^A-Za-z0-9▁\n\t])+"
_MAX_PIECE_CHARS = 16


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> tokenizers.Tokenizer:
    """Learns pieces from texts until the vocabulary has `vocab_size` entries.

    Raises:
      ValueError: `vocab_size` leaves no room for learned pieces, or the texts are too few for it.
    """
    room = vocab_size - FIRST_LEARNED - len(_ALPHABET)
    if room < 1:
        raise ValueError(f"vocab_size {vocab_size} is below {FIRST_LEARNED + len(_ALPHABET) + 1}, "
                         "the fixed tokens, the characters and one piece")  # fmt: skip
    merges = _learn_merges(texts, room)
    if len(merges) < room:
        raise ValueError(f"the texts give {len(merges)} pieces, vocab_size {vocab_size} asks for "
                         f"{room}: give more text or a smaller vocab_size")  # fmt: skip
    tokens = _fixed_tokens() + [a + b for a, b in merges] + _ALPHABET
    return _assemble({token: i for i, token in enumerate(tokens)}, _run_merges() + merges)


def _learn_merges(texts: Iterable[str], count: int) -> list[tuple[str, str]]:
    trained = tokenizers.Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", SPACE)
    trained.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(_WORDS), "removed", invert=True)
    trainer = trainers.BpeTrainer(
        vocab_size=len(_ALPHABET) + count,
        initial_alphabet=_ALPHABET,
        limit_alphabet=len(_ALPHABET),
        max_token_length=_MAX_PIECE_CHARS,
        show_progress=False,
    )
    trained.train_from_iterator(texts, trainer)
    return [tuple(pair) for pair in json.loads(trained.to_str())["model"]["merges"]]


def _fixed_tokens() -> list[str]:
    """Tokens 0 to 493 in order."""
    tokens = [SPECIAL_TOKENS.get(i, f"<unused{i - _FIRST_UNUSED}>") for i in range(FIRST_LEARNED)]
    tokens[5] = "[multimodal]"
    for n in range(1, LONGEST_RUN + 1):
        tokens[FIRST_NEWLINES + n - 1] = "\n" * n
        if n > 1:  # one space is an ordinary character
            tokens[FIRST_SPACES + n - 2] = SPACE * n
    tokens[FIRST_BYTE:] = [f"<0x{byte:02X}>" for byte in range(256)]
    return tokens


def _run_merges() -> list[tuple[str, str]]:
    """Merges, in rank order, that make one token of any run of up to 31.

    First doublings, which leave a run cut into falling powers of two; then the leftmost part,
    always the longest, takes in the others one by one.
    """
    powers = [1, 2, 4, 8]
    sizes = [(n, n) for n in powers]
    for left in range(LONGEST_RUN - 1, 0, -1):
        lowest_bit = left & -left
        sizes += [(left, n) for n in powers if n < lowest_bit and left + n <= LONGEST_RUN]
    return [(c * a, c * b) for c in ("\n", SPACE) for a, b in sizes]


def _assemble(vocab: dict[str, int], merges: list[tuple[str, str]]) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(_added(SPECIAL_TOKENS.values()))
    unused = [t for t in _fixed_tokens()[:FIRST_BYTE] if t.startswith(("<unused", "[multimodal]"))]
    tokenizer.add_tokens(_added(unused))
    return tokenizer


def _added(tokens: Iterable[str]) -> list[tokenizers.AddedToken]:
    return [tokenizers.AddedToken(token, normalized=False) for token in tokens]
