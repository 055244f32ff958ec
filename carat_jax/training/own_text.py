"""Text that a model wrote itself: prompts from a corpus, and its continuations."""

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
from flax import struct
from tqdm.auto import tqdm

from carat_jax.config import GemmaConfig
from carat_jax.generate import generate_tokens
from carat_jax.kv_state import state_bytes
from carat_jax.model import Params
from carat_jax.options import GenerateOptions
from carat_jax.training.token_stream import TokenStream, draw_windows, id_dtype

_CACHE_BYTES = 2**33  # of all rows that are written at once
_MOST_ROWS = 1024


class Texts(struct.PyTreeNode):
    """Windows of text, and which part of each is looked at.

    Attributes:
      tokens: [n, window + 1], see `id_dtype`.
      first: int32 [n], the last token of what was given; 0 where nothing but `<bos>` was.
      last: int32 [n], the last token that counts.
    """

    tokens: jax.Array
    first: jax.Array
    last: jax.Array


@dataclasses.dataclass(frozen=True)
class Writer:
    """A model, and how it writes.

    Attributes:
      params, config: of the model.
      options: the sampling of half of the texts, the other half is greedy; and the stop ids.
      window: tokens of a text after its `<bos>`. The prompt is at most half of them.
    """

    params: Params
    config: GemmaConfig
    options: GenerateOptions
    window: int

    def write(self, stream: TokenStream, count: int, seed: int, folder: Path) -> Texts:
        """Writes texts, or goes on where an earlier call with the same arguments broke off.

        Prompts have every length from one token up. Every text is as long as the window: after its
        end, which is its `last`, the model goes on as the corpus does.

        Args:
          stream: where prompts are from.
          count: of texts.
          seed: of what is drawn.
          folder: of this call's parts, one file each.
        """
        folder.mkdir(parents=True, exist_ok=True)
        parts = list(self._parts(count))
        key = jax.random.key(seed)
        texts = []
        for i, (rows, greedy) in enumerate(tqdm(parts, desc=folder.name, unit="part")):
            file = folder / f"{i:04d}.npz"
            if not file.is_file():
                part = self._write(stream, rows, greedy, jax.random.fold_in(key, i))
                temporary = file.with_suffix(".tmp.npz")
                np.savez(temporary, tokens=part.tokens, first=part.first, last=part.last)
                os.replace(temporary, file)
            with np.load(file) as part:
                texts.append(Texts(**part))
        return jax.tree.map(lambda *x: np.concatenate(x), *texts)

    def _parts(self, count: int) -> Iterator[tuple[int, bool]]:
        """Rows, and whether they are greedy: as many at once as there is room for."""
        row_bytes = state_bytes(self.config, 1, self._prompt + self.window)
        most = int(np.clip(_CACHE_BYTES // row_bytes, 1, _MOST_ROWS))
        for greedy, rest in ((True, (count + 1) // 2), (False, count // 2)):
            while rest > 0:
                rows = min(rest, most)
                yield rows, greedy
                rest -= rows

    def _write(self, stream: TokenStream, rows: int, greedy: bool, key: jax.Array) -> Texts:
        k0, k1, k2 = jax.random.split(key, 3)
        prompts = draw_windows(stream, k0, rows, self.window)[:, : self._prompt]
        lengths = jax.random.randint(k1, (rows,), 1, self._prompt + 1)
        options = self.options.replace(max_new_tokens=self.window, stop_token_ids=(), stop=())
        options = options.replace(temperature=0.0) if greedy else options
        out = generate_tokens(self.params, self.config, prompts, lengths, k2, options)
        prompts, lengths, tokens = jax.device_get((prompts, lengths, out.tokens))
        column = np.arange(self.window + 1)
        written = np.take_along_axis(
            tokens, np.clip(column - lengths[:, None], 0, self.window - 1), axis=1
        )
        given = np.pad(prompts, ((0, 0), (0, self.window + 1 - self._prompt)))
        own = column >= lengths[:, None]
        tokens = np.where(own, written, given)
        stops = own & np.isin(tokens, self.options.stop_token_ids)
        last = np.where(stops.any(1), stops.argmax(1), self.window)
        return Texts(
            tokens=tokens.astype(id_dtype(self.config.vocab_size)),
            first=(lengths - 1).astype(np.int32),
            last=last.astype(np.int32),
        )

    @property
    def _prompt(self) -> int:
        return max(1, self.window // 2)
