"""Gemma: configuration, weights and tokenizer in one object that generates."""

import dataclasses
import numbers
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from carat_jax import (
    checkpoint,
    compilation_cache,
    config_json,
    display,
    generate,
    memory,
    sharding,
)
from carat_jax.batch_run import BatchRun
from carat_jax.chat import ChatFormat, split_thinking
from carat_jax.config import GemmaConfig
from carat_jax.generation import Generation, Piece, Stream
from carat_jax.kv_state import init_state, state_bytes
from carat_jax.model import Params, forward
from carat_jax.options import GenerateOptions
from carat_jax.params import num_params, param_bytes
from carat_jax.prompts import Prompt, checked_ids, is_single
from carat_jax.speculative import (
    NUM_PROPOSALS,
    Drafter,
    Model,
    Ngram,
    NumProposals,
    Rule,
    Speculation,
)
from carat_jax.speculative.drafters.assistant_checkpoint import load_assistant
from carat_jax.speculative.drafters.model import check_vocabulary
from carat_jax.tokenizer import StopStrings, Tokenizer

LOGITS_CHUNKS = (64, 256)  # small, since each position has V float32 logits


def load(
    model: str | Path = "tiny",
    *,
    max_context: int | None = None,
    dtype: str | None = None,
    mesh: Mesh | None = None,
    progress: bool = True,
) -> "Gemma":
    """Loads a model onto the default device, or cut over the devices of a mesh.

    Also turns on JAX's persistent compilation cache (see `compilation_cache.enable`).

    Args:
      model: "tiny" (bundled), a folder, or a hub id like "google/gemma-4-31B-it".
      max_context: tokens of prompt and continuation together; None = the model's maximum. It is
        a limit: memory is taken as each call needs it.
      dtype: "bfloat16" or "float32"; None = the checkpoint's.
      mesh: from `carat.mesh`; everything that the model then does runs on it.
      progress: show progress bars on a terminal or in a notebook.

    Raises:
      FileNotFoundError: no such model, or no weights in its folder.
      ValueError: weights that are larger than the memory of the devices.
      ConfigError, CheckpointError, OptionError, ValueError: a file that cannot be used; each
        message says what is wrong with it.
    """
    compilation_cache.enable()
    folder = checkpoint.resolve(model)
    config = GemmaConfig.from_json(folder)
    if dtype is not None:
        config = dataclasses.replace(config, dtype=dtype)
    limit = config.max_position_embeddings
    if max_context is not None and not (
        isinstance(max_context, numbers.Integral)
        and not isinstance(max_context, bool)
        and 1 <= max_context <= limit
    ):
        raise ValueError(
            f"max_context = {max_context!r}: it must be an integer from 1 to the model's "
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
    memory.check_fits(config, mesh)
    params = checkpoint.load_params(folder, config, mesh=mesh, progress=progress)
    return Gemma(config, params, tokenizer, chat_format, options, max_context or limit)


def load_drafter(source: str | Path, gemma: "Gemma", *, progress: bool = True) -> Drafter:
    """What `generate(drafter=…)` takes, for this model.

    Args:
      source: "ngram" (copies from prompt and text, no weights), "tiny" (the bundled model's); or a
        folder or hub id, of an assistant drafter or of a smaller model with the same vocabulary.
      gemma: the model to be accelerated; the drafter takes its dtype and its mesh.
      progress: show progress bars on a terminal or in a notebook.

    Raises:
      FileNotFoundError: no such folder or id.
      ConfigError, CheckpointError, ValueError: a file that cannot be used, or a drafter that
        does not fit the model (the message names both fields); arguments in the other order.
    """
    if not isinstance(gemma, Gemma):
        raise ValueError(
            f"gemma is a {type(gemma).__name__}: give the drafter's name first, then the model "
            "that `load` returned"
        )
    if source == "ngram":
        return Ngram()
    try:
        folder = checkpoint.resolve(source)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"no drafter {str(source)!r}: there are 'ngram' (for any model) and 'tiny' (for the "
            "bundled one); or give a folder or hub id of an assistant drafter or smaller model"
        ) from None
    mesh = sharding.mesh_of(gemma.params)
    if source == "tiny":
        folder /= "drafter"
    kind = config_json.read(folder).get("model_type")
    if isinstance(kind, str) and kind.endswith("_assistant"):
        return load_assistant(folder, gemma.config, mesh)
    config = dataclasses.replace(GemmaConfig.from_json(folder), dtype=gemma.config.dtype)
    check_vocabulary(config, gemma.config)
    return Model(checkpoint.load_params(folder, config, mesh=mesh, progress=progress), config)


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

    def _repr_html_(self) -> str:
        c = self.config
        layers = [("global" if s.window is None else f"window of {s.window:,}") for s in c.layers]
        shown = {
            "weights": f"{num_params(c):,} in {c.dtype}, {display.size(param_bytes(c))}",
            "layers": ", ".join(f"{layers.count(kind)} × {kind}" for kind in dict.fromkeys(layers)),
            "state of one sequence": f"{display.size(state_bytes(c, 1, self.max_context))} "
            f"with room for {self.max_context:,} tokens",
            "vocabulary": f"{c.vocab_size:,}" + (", no tokenizer" if not self.tokenizer else ""),
        }
        return display.page("Gemma", display.fields(shown))

    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        *,
        drafter: Drafter | None = None,
        num_proposals: NumProposals = NUM_PROPOSALS,
        acceptance: Rule | None = None,
        profile: bool = False,
        **options: Any,
    ) -> Generation | list[Generation]:
        """Continues a prompt, or each prompt of a batch.

        Args:
          prompt: a string (it gets exactly one BOS), token ids (taken as they are), or a list of
            either. Rows do not mix: a row gets the tokens that it gets alone with its seed (see
            `GenerateOptions.seed`), though in bfloat16 rounding, which differs with the batch
            size, may decide between two nearly equal tokens.
          drafter: speculative decoding: what guesses the next tokens (see `load_drafter`).
          num_proposals: tokens that it guesses in a round; "auto" = as many as pay, from none to
            15, by the acceptance and the times measured so far (see `speculative.auto.Auto`). It
            learns anew in every call, from the first 18 rounds on, and may compile up to six
            programs: for long texts. What it chooses hangs on times; so from one run to the next
            may the text, where that hangs on the number of guesses: drawn guesses, and in
            bfloat16 nearly equal tokens. Hence not the default.
          acceptance: which guesses stand; None = `speculative.Exact()`, with which a drafter
            changes the speed only.
          profile: time drafting and verifying apart (`stats.draft_s`, `stats.verify_s`); slower,
            since drafting is done twice.
          **options: fields of `GenerateOptions`; the checkpoint's defaults fill in the rest.

        Returns:
          a Generation, or a list of them for a list of prompts.

        Raises:
          ValueError: before anything is compiled: an empty prompt, ids out of the vocabulary,
            prompt + max_new_tokens beyond max_context, an option out of its range, a drafter of
            another model, num_proposals beyond what drafter and rings allow; num_proposals,
            acceptance or profile without a drafter.
        """
        single = is_single(prompt)
        speculation = Speculation.of(drafter, num_proposals, acceptance, profile)
        run = self._prepare([prompt] if single else list(prompt), options, speculation)
        with run:
            for _ in run.advance(generate.DECODE_STEPS):
                pass
            results = [run.generation(row) for row in range(len(run.rows))]
        return results[0] if single else results

    def stream(
        self,
        prompt: Prompt,
        *,
        drafter: Drafter | None = None,
        num_proposals: NumProposals = NUM_PROPOSALS,
        acceptance: Rule | None = None,
        profile: bool = False,
        **options: Any,
    ) -> Stream:
        """Continues one prompt, giving text as it comes; the last piece has the whole.

        The state is freed when the iterator ends, is closed, or is garbage collected: if nothing
        but a loop holds it, as soon as the loop is left. One that a variable holds needs `close`.
        Arguments and errors as in `generate`, raised by this call, not by the first `next`. As the
        value of a notebook's cell the stream prints itself live.
        """
        if not is_single(prompt):
            raise ValueError("stream takes one prompt: use generate for a list")
        speculation = Speculation.of(drafter, num_proposals, acceptance, profile)
        return Stream(self._stream(self._prepare([prompt], options, speculation)))

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        thinking: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        drafter: Drafter | None = None,
        num_proposals: NumProposals = NUM_PROPOSALS,
        acceptance: Rule | None = None,
        profile: bool = False,
        **options: Any,
    ) -> Generation:
        """Answers a conversation; `thinking` of the result is apart from `text`.

        Args:
          messages: {"role": "system" | "user" | "assistant", "content": str}, …; the last
            is to be answered, so it is not the assistant's.
          thinking: let the model think first.
          tools: JSON schemas of tools it may call; a call shows in
            `text` as `call:name{…}`, and is not parsed.
          drafter, num_proposals, acceptance, profile: as in `generate`.
          **options: fields of `GenerateOptions`.

        Raises:
          ValueError: malformed messages, no tokenizer, and as `generate`.
        """
        ids = self.chat_prompt(messages, thinking=thinking, tools=tools)
        reply = self.generate(
            ids,
            drafter=drafter,
            num_proposals=num_proposals,
            acceptance=acceptance,
            profile=profile,
            **self.chat_options(options),
        )
        return self.chat_reply(reply, self.options.replace(**options))

    def chat_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        thinking: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """The ids that `chat` feeds to the model, ready for `generate` or `stream`.

        Raises:
          ValueError: as `chat`.
        """
        tokenizer = self._need_tokenizer("chat")
        prompt = self.chat_format.render(messages, thinking=thinking, tools=tools)
        if messages[-1]["role"] in ("assistant", "model"):
            raise ValueError(
                f"the last message has role {messages[-1]['role']!r}: the model answers a user or "
                "tool message, it does not go on with an answer; add the next user message"
            )
        return tokenizer.encode(prompt)

    def chat_options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """`options`, with the end of a turn among the stop ids unless they are given."""
        end = self._need_tokenizer("chat").token_id("<turn|>")
        stops = self.options.stop_token_ids
        if end is None or end in stops:
            return dict(options)
        return {"stop_token_ids": (*stops, end)} | dict(options)

    def chat_reply(self, reply: Generation, options: GenerateOptions) -> Generation:
        """What `chat` makes of a continuation of `chat_prompt`: thinking and answer apart."""
        tokenizer, hidden = self._need_tokenizer("chat"), options.stop_token_ids
        shown = [t for t in reply.tokens if tokenizer.has_id(t) and t not in hidden]
        thought, answer = split_thinking(tokenizer, shown)
        if thought is None:
            return reply
        thought, answer = (_until_stop(text, options.stop) for text in (thought, answer))
        return dataclasses.replace(reply, thinking=thought, text=answer)

    def logits(self, prompt: Prompt) -> jax.Array:
        """Teacher-forced logits, float32 [T, V] after the soft cap: row t predicts token t + 1.

        Raises:
          ValueError: as `generate`, for a prompt beyond max_context.
        """
        if not is_single(prompt):
            raise ValueError("logits takes one prompt: call it once for each")
        ids = self._ids(prompt)
        if len(ids) > self.max_context:
            raise ValueError(
                f"{len(ids):,} tokens exceed max_context {self.max_context:,}: "
                "shorten the prompt or load with a larger max_context"
            )
        slots = generate.capacity(len(ids), self.max_context)
        state = init_state(self.config, 1, slots, mesh=sharding.mesh_of(self.params))
        rows = []
        for tokens, new in generate.prefill_pieces([ids], LOGITS_CHUNKS):
            logits, state = _forward(self.params, self.config, tokens, state, jnp.asarray(new))
            rows.append(logits[0, : new[0]])
        return jnp.concatenate(rows)

    def _stream(self, run: BatchRun) -> Generator[Piece]:
        with run:
            row = run.rows[0]
            for new in run.advance(1):
                text, tokens = row.take_text(), new[0]
                if row.finish_reason is None and (text or tokens):
                    yield Piece(text, tokens)
                elif row.finish_reason is not None:
                    yield Piece(text, tokens, run.generation(0))

    def checked(
        self, prompts: Sequence[Prompt], given: Mapping[str, Any], max_context: int | None = None
    ) -> tuple[list[list[int]], GenerateOptions]:
        """Prompts as ids, and all options, after every check that needs no device.

        Args:
          prompts: strings or ids.
          given: fields of `GenerateOptions`.
          max_context: a limit below the model's own.

        Raises:
          ValueError: as `generate`.
        """
        limit = max_context or self.max_context
        options = self.options.replace(**given)
        options.check_vocabulary(self.config.vocab_size)
        if options.stop:
            self._need_tokenizer("stop")
        if not prompts:
            raise ValueError("no prompt: give a string, ids, or a list of at least one")
        rows = [self._ids(prompt) for prompt in prompts]
        longest = max(map(len, rows))
        if longest + options.max_new_tokens > limit:
            room = limit - longest
            ways = [f"max_new_tokens of at most {room:,}"] * (room > 0) + ["a shorter prompt"]
            ways += ["a larger max_context"] * (limit < self.config.max_position_embeddings)
            default = "" if "max_new_tokens" in given else " (the default of max_new_tokens)"
            raise ValueError(
                f"prompt {longest:,} + {options.max_new_tokens:,} new tokens{default} exceeds "
                f"max_context {limit:,}: give {' or '.join(ways)}"
            )
        return rows, options

    def _prepare(
        self,
        prompts: list[Prompt],
        given: Mapping[str, Any],
        speculation: Speculation | None,
    ) -> BatchRun:
        """Checks everything that can be checked; nothing is compiled or allocated before."""
        rows, options = self.checked(prompts, given)
        keys = generate.row_keys(options.seed, len(rows))
        return BatchRun(
            self.params,
            self.config,
            self.tokenizer,
            self.max_context,
            rows,
            options,
            keys,
            speculation,
        )

    def _ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            tokenizer = self._need_tokenizer("a text prompt")
            if not prompt:
                raise ValueError("empty prompt: give text, or the ids [bos] to start from nothing")
            return tokenizer.encode(prompt)
        return checked_ids(prompt, self.config.vocab_size)

    def _need_tokenizer(self, what: str) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError(
                f"{what} needs a tokenizer, and this checkpoint has no tokenizer.json: "
                "give token ids"
            )
        return self.tokenizer


_forward = jax.jit(
    lambda params, config, tokens, state, new: forward(params, config, tokens, state, new=new),
    static_argnums=1,
    donate_argnums=3,
)


def _until_stop(text: str, stops: tuple[str, ...]) -> str:
    cutter = StopStrings(stops)
    return cutter.push(text)[0] + cutter.flush()
