"""Gemma: configuration, weights and tokenizer in one object that generates."""

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from carat_jax import checkpoint, compilation_cache, generate
from carat_jax.chat import ChatFormat, split_thinking
from carat_jax.config import GemmaConfig
from carat_jax.generation import Generation, Piece, Stats
from carat_jax.kv_state import init_state
from carat_jax.model import Params, forward
from carat_jax.options import GenerateOptions
from carat_jax.tokenizer import StopStrings, StreamDecoder, Tokenizer

Prompt = str | Sequence[int]


LOGITS_CHUNKS = (64, 256)  # small, since each position has V float32 logits
FINISH_REASONS = {
    generate.STOP: "stop",
    generate.LENGTH: "length",
    generate.NON_FINITE: "non_finite",
}


def load(
    model: str | Path = "tiny",
    *,
    max_context: int | None = None,
    dtype: str | None = None,
    progress: bool = True,
) -> "Gemma":
    """Loads a model onto the default device.

    Also turns on JAX's persistent compilation cache (see `compilation_cache.enable`).

    Args:
      model: "tiny" (bundled), a folder, or a hub id like "google/gemma-4-31B-it".
      max_context: tokens of prompt and continuation together; None = the model's maximum. It is
        a limit: memory is taken as each call needs it.
      dtype: "bfloat16" or "float32"; None = the checkpoint's.
      progress: show progress bars on a terminal.

    Raises:
      FileNotFoundError: no such model, or no weights in its folder.
      ConfigError, CheckpointError, OptionError, ValueError: a file that cannot be used; each
        message says what is wrong with it.
    """
    compilation_cache.enable()
    folder = checkpoint.resolve(model)
    config = GemmaConfig.from_json(folder)
    if dtype is not None:
        config = dataclasses.replace(config, dtype=str(jnp.dtype(dtype)))
    limit = config.max_position_embeddings
    if max_context is not None and not 1 <= max_context <= limit:
        raise ValueError(
            f"max_context {max_context:,}: it must be from 1 to the model's "
            f"max_position_embeddings {limit:,}"
        )
    options = GenerateOptions.from_generation_config(folder / "generation_config.json")
    options.check_vocabulary(config.vocab_size)
    tokenizer = None
    if (folder / "tokenizer.json").is_file():
        tokenizer = Tokenizer.from_file(folder / "tokenizer.json")
        if tokenizer.vocab_size > config.vocab_size:
            raise ValueError(
                f"{folder}: tokenizer.json has {tokenizer.vocab_size:,} ids, the "
                f"model {config.vocab_size:,}: they do not belong together"
            )
    # The large sizes were tuned with an empty thought before the answer, the small ones without.
    chat_format = ChatFormat.from_folder(folder, config.hidden_size_per_layer_input == 0)
    params = checkpoint.load_params(folder, config, progress=progress)
    return Gemma(config, params, tokenizer, chat_format, options, max_context or limit)


class Gemma:
    """A loaded model. Calls are independent: the state lives as long as its generation.

    Attributes:
      config, params: for the functional level (`carat.forward`, `carat.generate_tokens`).
      tokenizer: None where the checkpoint has none; then prompts are ids and text stays empty.
      options: the defaults of every generation.
      max_context: tokens of prompt and continuation together.
    """

    def __init__(
        self,
        config: GemmaConfig,
        params: Params,
        tokenizer: Tokenizer | None,
        chat_format: ChatFormat,
        options: GenerateOptions,
        max_context: int,
    ) -> None:
        self.config = config
        self.params = params
        self.tokenizer = tokenizer
        self.chat_format = chat_format
        self.options = options
        self.max_context = max_context

    def __repr__(self) -> str:
        c = self.config
        return (
            f"Gemma({c.num_hidden_layers} layers, hidden_size {c.hidden_size}, {c.dtype}, "
            f"max_context {self.max_context})"
        )

    def generate(
        self, prompt: Prompt | Sequence[Prompt], **options: Any
    ) -> Generation | list[Generation]:
        """Continues a prompt, or each prompt of a batch.

        Args:
          prompt: a string (it gets exactly one BOS), token ids (taken as they are), or a list of
            either. A row of a batch gets what it would get alone.
          **options: fields of `GenerateOptions`; the checkpoint's defaults fill in the rest.

        Returns:
          a Generation, or a list of them for a list of prompts.

        Raises:
          ValueError: before anything is compiled: an empty prompt, ids out of the vocabulary,
            prompt + max_new_tokens beyond max_context, an option out of its range.
        """
        single = _is_single(prompt)
        run = self._prepare([prompt] if single else list(prompt), options)
        with run:
            for _ in run.advance(generate.DECODE_STEPS):
                pass
            results = [run.generation(row) for row in range(len(run.rows))]
        return results[0] if single else results

    def stream(self, prompt: Prompt, **options: Any) -> Iterator[Piece]:
        """Continues one prompt, giving text as it comes; the last piece has the whole.

        The state is freed when the iterator ends, is closed, or is left by an exception.
        Arguments and errors as in `generate`, raised by this call, not by the first `next`.
        """
        if not _is_single(prompt):
            raise ValueError("stream takes one prompt: use generate for a list")
        return self._stream(self._prepare([prompt], options))

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        thinking: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> Generation:
        """Answers a conversation; `thinking` of the result is apart from `text`.

        Args:
          messages: {"role": "system" | "user" | "assistant", "content": str}, …, user last.
          thinking: let the model think first.
          tools: JSON schemas of tools it may call; calls are left in the text's tokens.
          **options: fields of `GenerateOptions`.

        Raises:
          ValueError: malformed messages, no tokenizer, and as `generate`.
        """
        ids = self.chat_prompt(messages, thinking=thinking, tools=tools)
        reply = self.generate(ids, **options)
        tokenizer, asked = self._need_tokenizer("chat"), self.options.replace(**options)
        hidden = asked.stop_token_ids
        shown = [t for t in reply.tokens if t < tokenizer.vocab_size and t not in hidden]
        thought, answer = split_thinking(tokenizer, shown)
        if thought is None:
            return reply
        return dataclasses.replace(
            reply, thinking=_until_stop(thought, asked.stop), text=_until_stop(answer, asked.stop)
        )

    def chat_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        thinking: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """The ids that `chat` feeds to the model, ready for `generate` or `stream`."""
        tokenizer = self._need_tokenizer("chat")
        return tokenizer.encode(self.chat_format.render(messages, thinking=thinking, tools=tools))

    def logits(self, prompt: Prompt) -> jax.Array:
        """Teacher-forced logits, float32 [T, V] after the soft cap: row t predicts token t + 1.

        Raises:
          ValueError: as `generate`, for a prompt beyond max_context.
        """
        if not _is_single(prompt):
            raise ValueError("logits takes one prompt")
        ids = self._ids(prompt)
        if len(ids) > self.max_context:
            raise ValueError(
                f"{len(ids):,} tokens exceed max_context {self.max_context:,}: "
                "shorten the prompt or load with a larger max_context"
            )
        state = init_state(self.config, 1, generate.capacity(len(ids), self.max_context))
        rows, start = [], 0
        for size in generate.prefill_plan(len(ids), 1, LOGITS_CHUNKS):
            piece = ids[start : start + size]
            tokens = np.zeros((1, size), np.int32)
            tokens[0, : len(piece)] = piece
            new = jnp.asarray([len(piece)], jnp.int32)
            logits, state = _forward(self.params, self.config, tokens, state, new)
            rows.append(logits[0, : len(piece)])
            start += size
        return jnp.concatenate(rows)

    def _stream(self, run: "_Run") -> Iterator[Piece]:
        with run:
            row = run.rows[0]
            for new in run.advance(1):
                text, tokens = row.take_text(), new[0]
                if row.finish_reason is None and (text or tokens):
                    yield Piece(text, tokens)
                elif row.finish_reason is not None:
                    yield Piece(text, tokens, run.generation(0))

    def _prepare(self, prompts: list[Prompt], given: Mapping[str, Any]) -> "_Run":
        """Checks everything that can be checked; nothing is compiled or allocated before."""
        options = self.options.replace(**given)
        options.check_vocabulary(self.config.vocab_size)
        if options.stop:
            self._need_tokenizer("stop")
        if not prompts:
            raise ValueError("no prompt: give a string, ids, or a list of at least one")
        rows = [self._ids(prompt) for prompt in prompts]
        longest = max(map(len, rows))
        if longest + options.max_new_tokens > self.max_context:
            raise ValueError(
                f"prompt {longest:,} + {options.max_new_tokens:,} new tokens exceeds max_context "
                f"{self.max_context:,}: raise max_context or shorten"
            )
        keys = generate.row_keys(options.seed, len(rows))
        return _Run(self, rows, options, keys)

    def _ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            tokenizer = self._need_tokenizer("a text prompt")
            if not prompt:
                raise ValueError("empty prompt: give text, or the ids [bos] to start from nothing")
            return tokenizer.encode(prompt)
        ids = np.asarray(prompt)
        if ids.ndim != 1 or ids.size == 0:
            raise ValueError(
                f"empty prompt or nested ids (shape {ids.shape}): give at least one id"
            )
        if not np.issubdtype(ids.dtype, np.integer):
            raise ValueError(f"prompt ids are {ids.dtype}: they must be integers")
        if ids.min() < 0 or ids.max() >= self.config.vocab_size:
            wrong = ids[(ids < 0) | (ids >= self.config.vocab_size)][0]
            raise ValueError(f"prompt id {wrong}: ids go from 0 to {self.config.vocab_size - 1}")
        return ids.tolist()

    def _need_tokenizer(self, what: str) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError(
                f"{what} needs a tokenizer, and this checkpoint has no tokenizer.json: "
                "give token ids"
            )
        return self.tokenizer


class _Run:
    """One batch being generated: the device state, and each row's text so far.

    A context manager: leaving it frees the state, even while a traceback still refers to it.
    """

    def __init__(
        self, gemma: Gemma, prompts: list[list[int]], options: GenerateOptions, keys: jax.Array
    ) -> None:
        self.gemma = gemma
        self.prompts = prompts
        self.options = options
        self.keys = keys
        self.rows = [_Row(gemma.tokenizer, options) for _ in prompts]
        self.state: Any = None
        self.started = time.perf_counter()
        self.first_token_at = self.last_token_at = self.started

    def __enter__(self) -> "_Run":
        return self

    def __exit__(self, *_: object) -> None:
        for leaf in jax.tree.leaves(self.state):
            if isinstance(leaf, jax.Array) and not leaf.is_deleted():
                leaf.delete()
        self.state = None

    def advance(self, steps: int) -> Iterator[list[list[int]]]:
        """Generates, and yields each row's new ids every `steps` tokens (after the first one).

        The next call is dispatched before the tokens of the last are fetched, so the device does
        not wait for the host; what it made after a stop string is dropped.
        """
        params, config = self.gemma.params, self.gemma.config
        pending = self._begin()
        dispatched = 1
        while pending is not None:
            ahead = None
            if dispatched < self.options.max_new_tokens:
                stopped = jnp.asarray([row.finish_reason is not None for row in self.rows])
                ahead, self.state = generate.decode(
                    params,
                    config,
                    self.state,
                    jnp.int32(steps),
                    stopped,
                    size=generate.DECODE_STEPS,
                )
                dispatched += steps
            yield self._collect(jax.device_get(pending))
            pending = None if all(row.finish_reason for row in self.rows) else ahead

    def _begin(self) -> generate.Tokens:
        """Prefills and chooses the first token."""
        params, config, prompts = self.gemma.params, self.gemma.config, self.prompts
        batch, lengths = len(prompts), np.array([len(p) for p in prompts], np.int32)
        longest = int(lengths.max())
        slots = generate.capacity(longest + self.options.max_new_tokens, self.gemma.max_context)
        self.state = init_state(config, batch, slots)
        last = jnp.zeros((batch, config.hidden_size), jnp.dtype(config.dtype))
        start = 0
        for size in generate.prefill_plan(longest, batch):
            tokens = np.zeros((batch, size), np.int32)
            for row, ids in enumerate(prompts):
                piece = ids[start : start + size]
                tokens[row, : len(piece)] = piece
            new = np.clip(lengths - start, 0, size)
            last, self.state = generate.prefill_chunk(params, config, tokens, self.state, new, last)
            start += size
        controls = generate.Controls.of(self.options, self.keys)
        first, self.state = generate.begin(params, config, last, self.state, controls)
        return first

    def _collect(self, out: generate.Tokens) -> list[list[int]]:
        """Adds fetched tokens to the rows; returns what each row took."""
        now = time.perf_counter()
        if not any(row.tokens for row in self.rows):
            self.first_token_at = now
        taken = []
        for b, row in enumerate(self.rows):
            before = len(row.tokens)
            for i in range(int(out.num_tokens[b])):
                if row.finish_reason is not None:  # a stop string, maybe of an earlier call
                    break
                row.add(out, b, i)
            reason = int(out.finish[b])
            if row.finish_reason is None and reason != generate.RUNNING:
                row.end(FINISH_REASONS[reason])
            taken.append(row.tokens[before:])
        if any(taken):
            self.last_token_at = now
        return taken

    def generation(self, index: int) -> Generation:
        row = self.rows[index]
        later = max(len(r.tokens) for r in self.rows) - 1
        decode_s = self.last_token_at - self.first_token_at
        return Generation(
            text="".join(row.text),
            tokens=row.tokens,
            finish_reason=row.finish_reason or "length",
            prompt_tokens=len(self.prompts[index]),
            logprobs=row.logprobs,
            top_logprobs=row.top_logprobs,
            stats=Stats(
                ttft_s=self.first_token_at - self.started,
                tpot_s=decode_s / later if later > 0 else None,
            ),
            non_finite_step=len(row.tokens) if row.finish_reason == "non_finite" else None,
        )


class _Row:
    """Tokens and text of one row, as they come from the device."""

    def __init__(self, tokenizer: Tokenizer | None, options: GenerateOptions) -> None:
        k = options.num_logprobs
        self.tokens: list[int] = []
        self.logprobs: list[float] | None = None if k is None else []
        self.top_logprobs: list[dict[int, float]] | None = [] if k else None
        self.text: list[str] = []
        self.finish_reason: str | None = None
        self._taken = 0
        self._stop_ids = frozenset(options.stop_token_ids)
        self._known_ids = tokenizer.vocab_size if tokenizer else 0  # the table may have more rows
        self._decoder: StreamDecoder | None = tokenizer.stream_decoder() if tokenizer else None
        self._stops = StopStrings(options.stop)

    def add(self, out: generate.Tokens, b: int, i: int) -> None:
        """Takes column i of row b; may end the row by a stop string."""
        token = int(out.tokens[b, i])
        self.tokens.append(token)
        if self.logprobs is not None:
            self.logprobs.append(float(out.logprobs[b, i]))
        if self.top_logprobs is not None:
            pairs = zip(out.top_ids[b, i].tolist(), out.top_logprobs[b, i].tolist(), strict=True)
            self.top_logprobs.append(dict(pairs))
        if self._decoder is None or token in self._stop_ids or token >= self._known_ids:
            return
        text, stopped = self._stops.push(self._decoder.push(token))
        self.text.append(text)
        if stopped:
            self.finish_reason = "stop"

    def end(self, reason: str) -> None:
        """The device says that the row has ended: lets go of text that was held back."""
        if self._decoder is not None:
            text, stopped = self._stops.push(self._decoder.flush())
            self.text += [text, "" if stopped else self._stops.flush()]
            reason = "stop" if stopped else reason
        self.finish_reason = reason

    def take_text(self) -> str:
        """Text that came since the last call."""
        text = "".join(self.text[self._taken :])
        self._taken = len(self.text)
        return text


_forward = jax.jit(
    lambda params, config, tokens, state, new: forward(params, config, tokens, state, new=new),
    static_argnums=1,
    donate_argnums=3,
)


def _is_single(prompt: Prompt | Sequence[Prompt]) -> bool:
    """A string or flat ids, as against a list of prompts."""
    if isinstance(prompt, str):
        return True
    if hasattr(prompt, "ndim"):
        return prompt.ndim < 2
    if not isinstance(prompt, Sequence):
        raise ValueError(f"prompt is a {type(prompt).__name__}: give a string, ids, or a list")
    first = prompt[0] if len(prompt) else None
    return not (isinstance(first, str | Sequence) or getattr(first, "ndim", 0))


def _until_stop(text: str, stops: tuple[str, ...]) -> str:
    cutter = StopStrings(stops)
    return cutter.push(text)[0] + cutter.flush()
