"""Documents as token ids: one long stream on the device to draw from, and windows to measure on.

Every window begins with `<bos>` and then a whole line, as every prompt does.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from flax import struct
from jax import lax

from carat_jax.training.tokenizer_training import FIRST_NEWLINES, LONGEST_RUN, SPACE

EOS, BOS = 1, 2
HELD_OUT_WINDOWS = 64  # at most, where not all are measured
_HELD_OUT_BATCH = 8  # windows that are measured at once


class TokenStream(struct.PyTreeNode):
    """All training documents, one after the other.

    Attributes:
      tokens: [n], uint16 where the vocabulary allows it, else int32.
      lines: int32 [m], the places just before a line: a newline, or a document's `<bos>`.
      unindented: int32 [k], those of them whose line begins without a space.
    """

    tokens: jax.Array
    lines: jax.Array
    unindented: jax.Array


class Windows(struct.PyTreeNode):
    """Held-out text cut into pieces.

    Attributes:
      tokens: [n, length + 1]: `<bos>`, then up to `length` tokens to predict, then padding; dtype
        as in `TokenStream`.
      counts: int32 [n], how many of them are real.
    """

    tokens: jax.Array
    counts: jax.Array


def token_stream(
    tokenizer: tokenizers.Tokenizer, documents: Sequence[str], window: int
) -> TokenStream:
    """Encodes documents that spell out their own `<bos>` and `<eos>`.

    Args:
      tokenizer: newline runs where Gemma has them.
      documents: text.
      window: of `draw_windows`, so that no place is too close to the end for it.

    Raises:
      ValueError: fewer tokens than one window takes.
    """
    encoded = tokenizer.encode_batch_fast(list(documents), add_special_tokens=False)
    dtype = id_dtype(tokenizer.get_vocab_size())
    tokens = np.concatenate([np.array(e.ids, dtype) for e in encoded])
    if len(tokens) <= window + 1:
        raise ValueError(f"{len(tokens)} training tokens are fewer than a window of {window + 1}: "
                         "give more text or shorter windows")  # fmt: skip
    newline = (tokens >= FIRST_NEWLINES) & (tokens < FIRST_NEWLINES + LONGEST_RUN)
    before = (newline | (tokens == BOS))[: len(tokens) - window]
    before &= tokens[1 : len(before) + 1] != EOS
    pieces = [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())]
    indented = np.array([piece.startswith(SPACE) for piece in pieces])
    lines = np.flatnonzero(before).astype(np.int32)
    return TokenStream(
        tokens=jnp.asarray(tokens),
        lines=jnp.asarray(lines),
        unindented=jnp.asarray(lines[~indented[tokens[lines + 1]]]),
    )


def draw_windows(stream: TokenStream, key: jax.Array, batch: int, window: int) -> jax.Array:
    """Random windows int32 [batch, window + 1]; half of them begin at an unindented line.

    Programs begin so, and prompts like "def " do.
    """
    k0, k1, k2 = jax.random.split(key, 3)
    anywhere = jax.random.choice(k0, stream.lines, (batch,))
    unindented = jax.random.choice(k1, stream.unindented, (batch,))
    first = jnp.where(jax.random.bernoulli(k2, shape=(batch,)), anywhere, unindented)
    tokens = stream.tokens[first[:, None] + jnp.arange(window + 1)].astype(jnp.int32)
    return tokens.at[:, 0].set(BOS)


def held_out_windows(
    tokenizer: tokenizers.Tokenizer, sources: Mapping[str, str], window: int
) -> tuple[Windows, list[str]]:
    """Cuts whole sources, each ended by `<eos>`, into windows that together hold every token once.

    Returns:
      The windows, and for each the path of the source it is of.
    """
    rows, counts, paths = [], [], []
    for path, text in sources.items():
        ids = [*tokenizer.encode(text, add_special_tokens=False).ids, EOS]
        for first in range(0, len(ids), window):
            piece = ids[first : first + window]
            rows.append([BOS, *piece, *[0] * (window - len(piece))])
            counts.append(len(piece))
            paths.append(path)
    dtype = id_dtype(tokenizer.get_vocab_size())
    windows = Windows(
        tokens=jnp.asarray(np.array(rows, dtype)), counts=jnp.asarray(counts, jnp.int32)
    )
    return windows, paths


def id_dtype(vocab_size: int) -> type[np.integer]:
    """The smaller of uint16 and int32 that holds the ids."""
    return np.uint16 if vocab_size <= 2**16 else np.int32


def spread(windows: Windows) -> Windows:
    """Some of the windows, evenly spread: what is measured on the way."""
    n = len(windows.counts)
    index = np.linspace(0, n - 1, min(n, HELD_OUT_WINDOWS)).round().astype(int)
    return jax.tree.map(lambda x: x[index], windows)


def map_windows(function: Callable[[Any], Any], windows: Any) -> Any:
    """Arrays [n, ...] from a function that takes and gives a few rows of them at a time."""
    n = len(jax.tree.leaves(windows)[0])
    batch = min(_HELD_OUT_BATCH, n)

    def batches(x: jax.Array) -> jax.Array:
        padded = jnp.pad(x, [(0, -n % batch)] + [(0, 0)] * (x.ndim - 1))
        return padded.reshape(-1, batch, *x.shape[1:])

    results = lax.map(function, jax.tree.map(batches, windows))
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:n], results)
