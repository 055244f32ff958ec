"""Google's assistant drafters: a few layers that read the target's own keys and values.

A step takes the last token's embedding and the hidden state that chose it, both of the target,
and gives scores of the next token and the hidden state that the next step takes. It stores
nothing: every step of a round stands at the same position and sees the same keys.

On a mesh its layers are cut as the target's are, since each device has the keys and values of its
own heads only; what is no layer's is on every device.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jax.sharding import PartitionSpec as P

from carat_jax import kv_state, rope, sharding
from carat_jax.attention import Keys, Step
from carat_jax.config import FULL, SLIDING, GemmaConfig, LayerType
from carat_jax.layers import Entry, add_and_enter, linear, weight
from carat_jax.model import Block, Params, embed
from carat_jax.params import random_params
from carat_jax.speculative.drafters.assistant_config import AssistantConfig, check_pair
from carat_jax.speculative.protocol import Drafter, Proposal, Target


class Scores(NamedTuple):
    """Scores of the tokens that a drafter considers.

    Attributes:
      logits: float32 [..., n].
      ids: int32 [..., n], the tokens; None where they are the vocabulary in its order (n = V).
    """

    logits: jax.Array
    ids: jax.Array | None

    def best(self) -> jax.Array:
        """The token with the highest score, int32 [...]."""
        first = jnp.argmax(self.logits, axis=-1).astype(jnp.int32)
        if self.ids is None:
            return first
        return jnp.take_along_axis(self.ids, first[..., None], axis=-1)[..., 0]


class Assistant(Drafter):
    """An assistant drafter, from `load_assistant` or `random`. Stateless; proposes points.

    Attributes:
      params: weights of `AssistantModel`.
      token_ordering: int32 [C, V / C], the tokens of each cluster; None with a full head.
      config: static.
    """

    params: Params
    token_ordering: jax.Array | None
    config: AssistantConfig = struct.field(pytree_node=False)

    @classmethod
    def abstract(cls, config: AssistantConfig) -> "Assistant":
        """A drafter with `jax.ShapeDtypeStruct` leaves; nothing is allocated."""
        text = config.text
        dtype = jnp.dtype(text.dtype)
        x = jax.ShapeDtypeStruct((1, 1, config.backbone_hidden_size), dtype)
        row = jax.ShapeDtypeStruct((1,), jnp.int32)
        lent = {}
        for kind, spec in zip(text.layer_types, config.layers, strict=True):
            kv = jax.ShapeDtypeStruct((1, spec.num_kv_heads, 1, spec.head_dim), dtype)
            lent[kind] = Keys(k=kv, v=kv)
        step = Step(length=row, new=row, decode=False)
        init = AssistantModel(config).init
        params = jax.eval_shape(init, jax.random.key(0), x, x, lent, step)["params"]
        ordering = None
        if config.use_ordered_embeddings:
            ordering = jax.ShapeDtypeStruct(_clusters(config), jnp.int32)
        return cls(params=params, token_ordering=ordering, config=config)

    @classmethod
    def random(cls, config: AssistantConfig, key: jax.Array) -> "Assistant":
        """Random weights (see `params.random_params`) and clusters."""
        weights, clusters = jax.random.split(key)
        params = random_params(cls.abstract(config).params, weights)
        ordering = None
        if config.use_ordered_embeddings:
            ids = jax.random.permutation(clusters, config.text.vocab_size)
            ordering = ids.astype(jnp.int32).reshape(_clusters(config))
        return cls(params=params, token_ordering=ordering, config=config)

    def init(self, config: GemmaConfig, batch: int, max_context: int) -> None:
        """No state. Raises ConfigError where the drafter does not fit the target."""
        del batch, max_context
        check_pair(self.config, config)

    def propose(
        self, state: Any, target: Target, num_proposals: int, keys: jax.Array
    ) -> tuple[Proposal, Any]:
        """See `Drafter.propose`. The likeliest token each time."""
        del keys
        token, hidden, tokens = target.token, target.hidden, []
        for _ in range(num_proposals):
            scores, hidden = self.draft(target, token, hidden)
            token = scores.best()
            tokens.append(token)
        return Proposal(tokens=jnp.stack(tokens, axis=1)), state

    def draft(
        self, target: Target, token: jax.Array, hidden: jax.Array
    ) -> tuple[Scores, jax.Array]:
        """One step of a round.

        Args:
          target: at the start of the round, whatever the step.
          token: int32 [B], the newest token: the target's, then the drafter's.
          hidden: [B, D], the target's for the first step, then what the last step returned.

        Returns:
          Scores [B, n] of the next token, and hidden [B, D] for the next step.
        """
        # All steps of a round stand where the keys end, one before `token`. Runtimes differ in
        # that position; it changes acceptance, never the output.
        length = target.kv.length - 1
        step = Step(length=length, new=jnp.ones_like(length), decode=True)
        embedded = embed(target.params, target.config, token)

        def run(params, token_ordering, embedded, hidden, lent, step):
            model = AssistantModel(self.config, sharding.shards(mesh)).bind({"params": params})
            with jax.named_scope("draft"):
                y, hidden = model(embedded[:, None], hidden[:, None], lent, step)
                return model.scores(y[:, 0], token_ordering), hidden[:, 0]

        lent, mesh = lent_keys(target), sharding.mesh_of(self.params)
        arguments = (self.params, self.token_ordering, embedded, hidden, lent, step)
        if mesh is None:
            return run(*arguments)
        rows = sharding.rows(mesh, len(token))
        kv = kv_state.specs(rows).layers
        keys = Keys(v=kv, k=kv, k_rotated=kv, k_norm=P())
        own = sharding.specs(self.params, top={})
        return jax.shard_map(
            run,
            mesh=mesh,
            in_specs=(own, P(), rows, rows, dict.fromkeys(lent, keys), rows),
            out_specs=rows,
            check_vma=False,
        )(*arguments)


class AssistantModel(nn.Module):
    """The network, for any number of positions.

    Weights, D being the target's width and h the drafter's: pre_projection [2 D, h], layers_i,
    norm [h], post_projection [h, D], embed_tokens [V, h] (only the head) and, with clusters,
    centroids [h, C].
    """

    config: AssistantConfig
    shards: int = 1

    def setup(self) -> None:
        c, text = self.config, self.config.text
        D, h = c.backbone_hidden_size, text.hidden_size
        self.pre_projection = weight(self, "pre_projection", (2 * D, h), text)
        self.layers = [Block(text, spec, self.shards) for spec in c.layers]
        self.norm = weight(self, "norm", (h,), text)
        self.post_projection = weight(self, "post_projection", (h, D), text)
        self.embed_tokens = weight(self, "embed_tokens", (text.vocab_size, h), text)
        if c.use_ordered_embeddings:
            self.centroids = weight(self, "centroids", (h, c.num_centroids), text)

    def __call__(
        self,
        embedded: jax.Array,
        hidden: jax.Array,
        lent: Mapping[LayerType, Keys],
        step: Step,
    ) -> tuple[jax.Array, jax.Array]:
        """Runs T positions of each sequence.

        Args:
          embedded: [B, T, D], the target's scaled embedding of the newest token.
          hidden: [B, T, D], the target's hidden state under its final norm at the position that
            chose that token, or what this function returned for the step before.
          lent: the target's keys and values, by the type of layer that reads them.
          step: where the positions are. Nothing is written: the last one is the last with keys.

        Returns:
          [B, T, h] for `scores`, and the next step's `hidden` [B, T, D].
        """
        c = self.config.text
        read = jnp.concatenate([embedded, hidden], axis=-1)
        h = linear(read, self.pre_projection, partial=True)
        positions = step.positions(h.shape[1])
        angles = {
            kind: rope.angles(positions, spec)
            for kind, spec in zip(c.layer_types, self.config.layers, strict=True)
        }
        h, y = add_and_enter(None, h, None, self.layers[0].entry, c.rms_norm_eps)
        following = [*(block.entry for block in self.layers[1:]), Entry(self.norm, None)]
        for kind, block, after in zip(c.layer_types, self.layers, following, strict=True):
            h, y, _, _ = block(h, y, after, None, angles[kind], step, None, lent[kind])
        return y, linear(y, self.post_projection)

    def scores(self, y: jax.Array, token_ordering: jax.Array | None) -> Scores:
        """Scores [..., n] from y [..., h]; n = V, or the tokens of the likeliest clusters."""
        table = self.embed_tokens
        if token_ordering is None:
            return Scores(linear(y, table, jnp.float32, transposed=True), None)
        _, nearest = lax.top_k(
            linear(y, self.centroids, jnp.float32), self.config.centroid_intermediate_top_k
        )
        ids = token_ordering[nearest].reshape(*y.shape[:-1], -1)
        logits = jnp.einsum(
            "...nh,...h->...n",
            table[ids],
            y,
            precision=lax.Precision.HIGHEST if table.dtype == jnp.float32 else None,
            preferred_element_type=jnp.float32,
        )
        return Scores(logits, ids)


def lent_keys(target: Target) -> dict[LayerType, Keys]:
    """For each type, the keys and values of the target's last layer that owns some, as they lie."""
    lent: dict[LayerType, Keys] = {}
    for spec, kv in zip(target.config.kv_layers, target.kv.layers, strict=True):
        if spec.window is not None:
            lent[SLIDING] = Keys(k=kv.k, v=kv.v)
        elif spec.shared_projection:
            k_norm = target.params[f"layers_{spec.index}"]["attention"]["k_norm"]
            lent[FULL] = Keys(v=kv.v, k_rotated=kv.k_rotated, k_norm=k_norm)
        else:
            lent[FULL] = Keys(k=kv.k, v=kv.v)
    return lent


def _clusters(config: AssistantConfig) -> tuple[int, int]:
    return config.num_centroids, config.text.vocab_size // config.num_centroids
