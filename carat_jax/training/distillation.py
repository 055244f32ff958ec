"""Teaching an assistant drafter what its target will say.

In a round that begins with L tokens in the cache, every step of the drafter stands at position
L - 1 and sees the keys up to there. So the step of all rounds that a text could have, one for each
L, is one causal pass over the text: row L - 1 of the target's hidden states and keys, with the
embedding of token L for the first step and of token L - 1 + i for step i. K passes, each fed
what the one before returned, are K-step rounds at every position at once.

The tokens fed are those of the text, not the drafter's own guesses. Where a guess differs from the
text, the round ends there in use, and what the later steps would have said does not matter.
"""

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from carat_jax.attention import Keys, Step
from carat_jax.config import FULL, SLIDING, GemmaConfig, LayerType
from carat_jax.model import Gemma4, Params, embedding_scale, head
from carat_jax.speculative.drafters.assistant import AssistantModel
from carat_jax.speculative.drafters.assistant_config import AssistantConfig
from carat_jax.training.loop import Figures, Task
from carat_jax.training.own_text import Texts
from carat_jax.training.token_stream import TokenStream, draw_windows, map_windows

_LOGITS = 2**27  # of either model that are held at once


class Distillation(Task):
    """The loss is the mean over K steps of KL(target ‖ drafter), in nats: 0 for a perfect drafter.

    Half of a batch is from the corpus, half is text that the target wrote itself: that is what a
    drafter has before it in use, but there is less of it.

    Attributes:
      target: its parameters, in its dtype; the drafter's passes run in that dtype too.
      stream: the corpus.
      own: [n, window + 1], texts by the target.
      held_out_corpus, held_out_own: to measure on; the loss is that on the second.
      config: static, of the target.
      drafter: static; with a full head.
      batch, window: static; see `TrainingOptions`.
      num_proposals: static, K.
    """

    target: Params
    stream: TokenStream
    own: jax.Array
    held_out_corpus: Texts
    held_out_own: Texts
    config: GemmaConfig = struct.field(pytree_node=False)
    drafter: AssistantConfig = struct.field(pytree_node=False)
    batch: int = struct.field(pytree_node=False)
    window: int = struct.field(pytree_node=False)
    num_proposals: int = struct.field(pytree_node=False)

    def loss(self, params: Params, key: jax.Array) -> tuple[jax.Array, Figures]:
        """The figures are `Sums.figures`, but for the acceptance."""
        k0, k1 = jax.random.split(key)
        own = jax.random.choice(k0, self.own, (self.batch // 2,)).astype(jnp.int32)
        corpus = draw_windows(self.stream, k1, self.batch - self.batch // 2, self.window)
        ends = jnp.full((self.batch,), self.window)
        texts = Texts(jnp.concatenate([own, corpus]), first=jnp.zeros_like(ends), last=ends)
        figures = self.compare(params, texts).figures()
        del figures["acceptance"]  # has no meaning on text by somebody else
        return jnp.mean(figures["losses"]), figures

    def measure(self, params: Params) -> tuple[jax.Array, Figures]:
        """The figures are `Sums.figures` of either kind of held-out text."""
        own, corpus = (
            map_windows(lambda batch: self.compare(params, batch), texts).figures()
            for texts in (self.held_out_own, self.held_out_corpus)
        )
        del corpus["acceptance"]
        return jnp.mean(own["losses"]), {"own": own, "corpus": corpus}

    def compare(self, params: Params, texts: Texts) -> "Sums":
        """What drafter and target say in every round that B texts could have: [B, K] each."""
        config, K = self.config, self.num_proposals
        params = jax.tree.map(lambda p: p.astype(self.config.dtype), params)
        tokens = texts.tokens.astype(jnp.int32)
        hidden, lent = lax.stop_gradient(read_target(self.target, config, tokens[:, :-1]))
        embedded = self.target["embed_tokens"][tokens[:, :-1]] * embedding_scale(config)
        y = unroll(self.drafter, params, embedded, hidden, lent, K)

        def sums(row: tuple[Texts, jax.Array, jax.Array]) -> Sums:
            text, hidden, y = row
            logits = lax.stop_gradient(head(self.target, config, hidden))
            guesses = AssistantModel(self.drafter).bind({"params": params}).scores(y, None)
            return compare_row(logits, guesses.logits, text)

        # One text's logits, or a few texts', are made, used and made again for the gradient:
        # those of all would be the largest arrays by far.
        at_once = max(1, _LOGITS // (tokens.shape[1] * config.vocab_size * K))
        rows = (texts.replace(tokens=tokens), hidden, y)
        return lax.map(jax.checkpoint(sums), rows, batch_size=at_once)


class Sums(struct.PyTreeNode):
    """Sums over the positions of a window: float32 [..., K], step by step.

    Attributes:
      rounds: positions that count: those whose proposed token is one of the text.
      loss: KL(target ‖ drafter) in nats.
      agreed: the drafter's likeliest token is the target's.
      accepted: the tokens proposed up to this one are those of the text. Where the target wrote
        the text, this is how often a proposal would have stood.
    """

    rounds: jax.Array
    loss: jax.Array
    agreed: jax.Array
    accepted: jax.Array

    def figures(self) -> Figures:
        """Means over all windows, [K] each: losses, agreement, acceptance."""
        total = jax.tree.map(lambda x: x.reshape(-1, x.shape[-1]).sum(0), self)
        return {
            "losses": total.loss / total.rounds,
            "agreement": total.agreed / total.rounds,
            "acceptance": total.accepted / total.rounds,
        }


def read_target(
    params: Params, config: GemmaConfig, tokens: jax.Array
) -> tuple[jax.Array, dict[LayerType, Keys]]:
    """A pass over tokens int32 [B, T] alone: what a drafter reads.

    Returns:
      hidden [B, T, D] under the final norm, and for each type of layer the keys and values of the
      last one that owns some.
    """
    step = Step.of(config, None, tokens, None, None)
    (hidden, _), recorded = Gemma4(config).apply(
        {"params": params}, tokens, None, step, mutable=["intermediates"]
    )
    keys = recorded["intermediates"]["keys"][0]
    lent = {SLIDING if s.window is not None else FULL: keys[s.index] for s in config.kv_layers}
    return hidden, lent


def unroll(
    config: AssistantConfig,
    params: Params,
    embedded: jax.Array,
    hidden: jax.Array,
    lent: Mapping[LayerType, Keys],
    num_proposals: int,
) -> jax.Array:
    """K steps of the drafter for the round that begins after each position but the last K.

    Args:
      config, params: of the drafter.
      embedded: [B, T, D], the target's scaled embeddings of the text.
      hidden, lent: of the same positions, from `read_target`.
      num_proposals: K, below T.

    Returns:
      [B, K, T - K, h] for the drafter's head. Step i (from 0) of position t proposes token t + i
      + 2: the target's own logits of position t + i + 1 are about it too.
    """
    model = AssistantModel(config).bind({"params": params})
    B, T = embedded.shape[:2]
    starts = T - num_proposals
    rows = jnp.zeros((B,), jnp.int32)
    step = Step(length=rows, new=rows + starts, decode=False)
    lent = {kind: _first(keys, starts) for kind, keys in lent.items()}
    hidden, steps = hidden[:, :starts], []
    for i in range(num_proposals):
        y, hidden = model(embedded[:, i + 1 : i + 1 + starts], hidden, lent, step)
        steps.append(y)
    return jnp.stack(steps, axis=1)


def compare_row(logits: jax.Array, guesses: jax.Array, text: Texts) -> Sums:
    """One text's sums, [K] each.

    Args:
      logits: float32 [T, V] of the target; row t is about token t + 1.
      guesses: float32 [K, T - K, V] of the drafter, by step and position.
      text: tokens int32 [T + 1], first and last int32 [].
    """
    starts = guesses.shape[1]
    logp = jax.nn.log_softmax(logits)
    p, likeliest = jnp.exp(logp), jnp.argmax(logits, axis=-1)
    entropy = -(p * logp).sum(-1)
    position, matches, steps = jnp.arange(starts), jnp.ones((starts,), bool), []
    for i, guess in enumerate(guesses):
        about = slice(i + 1, i + 1 + starts)
        cross_entropy = jax.nn.logsumexp(guess, axis=-1) - (p[about] * guess).sum(-1)
        proposed = jnp.argmax(guess, axis=-1)
        matches &= proposed == text.tokens[i + 2 : i + 2 + starts]
        each = Sums(
            rounds=jnp.ones((starts,)),
            loss=cross_entropy - entropy[about],
            agreed=proposed == likeliest[about],
            accepted=matches,
        )
        counts = (position >= text.first) & (position + i + 2 <= text.last)
        steps.append(jax.tree.map(functools.partial(_sum_where, counts), each))
    return jax.tree.map(lambda *x: jnp.stack(x), *steps)


def _sum_where(counts: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.where(counts, x, 0).sum(dtype=jnp.float32)


def _first(keys: Keys, count: int) -> Keys:
    cut = {name: getattr(keys, name) for name in ("k", "v", "k_rotated")}
    return keys._replace(**{n: x if x is None else x[:, :, :count] for n, x in cut.items()})
