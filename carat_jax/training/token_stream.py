"""Documents as token ids: one long stream on the device to draw from, and windows to measure on.

Every window begins with `<bos>` and then a whole line, as every prompt does.
"""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from flax import struct

from carat_jax.training.tokenizer_training import FIRST_NEWLINES, LONGEST_RUN, SPACE

EOS, BOS = 1, 2


class TokenStream(struct.PyTreeNode):
    """All training documents, one after the other.

    Attributes:
      tokens: uint16 [n].
      lines: int32 [m], the places just before a line: a newline, or a document's `<bos>`.
      unindented: int32 [k], those of them whose line begins without a space.
    """

    tokens: jax.Array
    lines: jax.Array
    unindented: jax.Array


class Windows(struct.PyTreeNode):
    """Held-out text cut into pieces.

    Attributes:
      tokens: uint16 [n, length + 1]: `<bos>`, then up to `length` tokens to predict, then padding.
      counts: int32 [n], how many of them are real.
    """

    tokens: jax.Array
    counts: jax.Array


def token_stream(
    tokenizer: tokenizers.Tokenizer, documents: Sequence[str], window: int
) -> TokenStream:
    """Encodes documents that spell out their own `<bos>` and `<eos>`.

    Args:
      tokenizer: at most 65,536 ids, newline runs where Gemma has them.
      documents: text.
      window: of `draw_windows`, so that no place is too close to the end for it.

    Raises:
      ValueError: fewer tokens than one window takes.
    """
    encoded = tokenizer.encode_batch_fast(list(documents), add_special_tokens=False)
    tokens = np.concatenate([np.array(e.ids, np.uint16) for e in encoded])
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
    windows = Windows(
        tokens=jnp.asarray(np.array(rows, np.uint16)), counts=jnp.asarray(counts, jnp.int32)
    )
    return windows, paths
