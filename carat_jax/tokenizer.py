"""Text to token ids and back: `tokenizer.json`, streamed UTF-8, stop strings.

Encoding is the `tokenizers` library's. Decoding is done here, one token's bytes after another
through one incremental UTF-8 decoder, so that streaming and decoding at once cannot differ.
"""

import codecs
import operator
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Self

import tokenizers

# Far above Gemma's 32 MB and 262,144 entries; a file beyond them is damaged or hostile.
_MAX_FILE_BYTES = 256 * 2**20
_MAX_VOCAB = 2**20

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# What Gemma's decoder (Replace, ByteFallback, Fuse) makes of these pieces. Another decoder, for
# instance one that strips the first space, would give another text.
_DECODER_PROBE = (["▁a", "▁b", "<0xE2>", "<0x82>", "<0xAC>"], " a b€")


class Tokenizer:
    """A Gemma tokenizer: BPE over text in which "▁" stands for a space, with byte fallback.

    Attributes:
      vocab_size: one more than the largest id (the model's table may have more rows).
      bos_id, eos_id, pad_id: ids of `<bos>`, `<eos>`, `<pad>`; None where there is none.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        """Takes over `backend`; its truncation and padding are switched off.

        Raises:
          ValueError: empty or over-large vocabulary, or a decoder other than Gemma's.
        """
        vocab = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = 1 + max(vocab.values(), default=-1)
        if not 0 < self.vocab_size <= _MAX_VOCAB:
            raise ValueError(
                f"vocabulary of {self.vocab_size:,} ids; supported are 1 to {_MAX_VOCAB:,}"
            )
        pieces, text = _DECODER_PROBE
        if backend.decoder is None or backend.decoder.decode(pieces) != text:
            raise ValueError(
                'not a Gemma tokenizer: its decoder must turn "▁" into a space, join <0xNN> tokens '
                f"to UTF-8 and strip nothing, but it is {backend.decoder}"
            )
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._special_ids = frozenset(
            token_id for token_id, t in backend.get_added_tokens_decoder().items() if t.special
        )
        self.bos_id = self.token_id("<bos>")
        self.eos_id = self.token_id("<eos>")
        self.pad_id = self.token_id("<pad>")

    def __repr__(self) -> str:
        return (
            f"Tokenizer({self.vocab_size:,} ids, bos_id {self.bos_id}, eos_id {self.eos_id}, "
            f"pad_id {self.pad_id})"
        )

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        """Reads a `tokenizer.json`.

        Raises:
          FileNotFoundError: there is no such file.
          ValueError: too large, not a tokenizer, or not one of Gemma's structure.
        """
        path = Path(os.path.expanduser(path))
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such file; a tokenizer.json is expected")
        if (size := path.stat().st_size) > _MAX_FILE_BYTES:
            raise ValueError(f"{path}: {size:,} bytes, over the limit of {_MAX_FILE_BYTES:,}")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"{path}: not a valid tokenizer.json: {error}") from error
        try:
            return cls(backend)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    def token_id(self, token: str) -> int | None:
        """The id of a token by its exact name, such as "<|turn>"; None where there is none."""
        return self._backend.token_to_id(token)

    def encode(self, text: str, *, add_bos: bool = True) -> list[int]:
        """Token ids of `text`; special tokens written out in it become their ids.

        With `add_bos` the ids begin with exactly one `<bos>`, however many the text begins with.
        Without it nothing is added or taken away. The file's post-processor is never applied.
        Surrogate pairs are joined; a lone surrogate, which UTF-8 cannot carry, becomes "\\ufffd".

        Raises:
          ValueError: `add_bos` where the vocabulary has no `<bos>`.
        """
        ids = self._backend.encode(_well_formed(text), add_special_tokens=False).ids
        if not add_bos:
            return ids
        if self.bos_id is None:
            raise ValueError("the vocabulary has no <bos> token: pass add_bos=False")
        start = next((i for i, token_id in enumerate(ids) if token_id != self.bos_id), len(ids))
        return [self.bos_id, *ids[start:]]

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of `ids`: what the pieces of a `stream_decoder` join to.

        Bytes that are not UTF-8 become "\\ufffd". `skip_special` drops the tokens that the file
        marks as special.

        Raises:
          ValueError: an id outside the vocabulary.
        """
        stream = self.stream_decoder(skip_special=skip_special)
        return "".join([stream.push(token_id) for token_id in ids]) + stream.flush()

    def stream_decoder(self, *, skip_special: bool = True) -> "StreamDecoder":
        """A decoder for one sequence, fed token by token."""
        return StreamDecoder(self, skip_special=skip_special)

    def has_id(self, token_id: int) -> bool:
        """Whether a token has this id; a model's table may have more rows than there are tokens."""
        return 0 <= token_id < self.vocab_size and self._backend.id_to_token(token_id) is not None

    def is_special(self, token_id: int) -> bool:
        """Whether the file marks this token as special."""
        return token_id in self._special_ids

    def token_bytes(self, token_id: int) -> bytes:
        """What a token contributes to the UTF-8 text: one byte for `<0xNN>`, else its characters.

        Raises:
          ValueError: an id outside the vocabulary.
        """
        index = operator.index(token_id)
        token = self._backend.id_to_token(index) if 0 <= index < self.vocab_size else None
        if token is None:
            raise ValueError(f"token id {index} is not in the vocabulary of {self.vocab_size:,}")
        if byte := _BYTE_TOKEN.fullmatch(token):
            return bytes.fromhex(byte[1])
        return token.replace("▁", " ").encode()


class StreamDecoder:
    """Turns one sequence of token ids into text as they come.

    A character whose UTF-8 bytes are spread over several tokens is held back until its last byte.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The text that this token completes, possibly "".

        Raises:
          ValueError: an id outside the vocabulary.
        """
        if self._skip_special and self._tokenizer.is_special(token_id):
            return ""
        return self._utf8.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        """At the end of the sequence: "\\ufffd" if it broke off inside a character, else ""."""
        return self._utf8.decode(b"", final=True)


class StopStrings:
    """Cuts streamed text before the first of several stop strings that is completed.

    Of two that are completed by the same character the longer counts. How the text is cut into
    pieces makes no difference.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """
        Raises:
          ValueError: `stops` is itself a string, or an entry is empty or no string.
        """
        if isinstance(stops, str):
            raise ValueError(f"stop strings must be a list, not the string {stops!r}: [{stops!r}]")
        for stop in stops:
            if not isinstance(stop, str) or not stop:
                raise ValueError(f"stop strings must be non-empty strings, not {stop!r}")
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self._stopped = False

    def push(self, text: str) -> tuple[str, bool]:
        """Takes more text; returns (what can be emitted now, whether a stop string was met).

        A tail that may be the beginning of a stop string is held back. Once stopped, always
        ("", True).
        """
        if self._stopped:
            return "", True
        text = self._held + text
        spans = [
            (start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0
        ]
        if spans:
            _, start = min(spans)
            self._held, self._stopped = "", True
            return text[:start], True
        cut = len(text) - self._beginning_at_end(text)
        self._held = text[cut:]
        return text[:cut], False

    def flush(self) -> str:
        """At the end of the text: what was held back and turned out to be no stop string."""
        held, self._held = self._held, ""
        return held

    def _beginning_at_end(self, text: str) -> int:
        """Length of the longest tail of `text` with which some stop string begins."""
        for length in range(min(len(text), self._longest), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0


def _well_formed(text: str) -> str:
    """`text` as UTF-8 can carry it: surrogate pairs joined, lone surrogates replaced."""
    if not isinstance(text, str):
        raise TypeError(f"text must be a str, not {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
