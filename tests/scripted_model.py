"""A model whose text is known beforehand: each token is followed by the one that a table names.

One layer whose attention adds nothing and whose MLP looks the successor up, with a small
tokenizer of Gemma's structure. The weights are arguments of the jitted functions, so all scripts
share their compilations.
"""

import dataclasses
import json
import string
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import random_checkpoints
import tokenizers
from flax import traverse_util
from safetensors.numpy import save_file
from tokenizers import decoders, models, normalizers

from carat_jax.chat import ChatFormat
from carat_jax.config import FULL, GemmaConfig
from carat_jax.gemma import Gemma
from carat_jax.model import Params
from carat_jax.options import GenerateOptions
from carat_jax.params import abstract_params
from carat_jax.tokenizer import Tokenizer

SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>", "<|think|>", "<|channel>", "<channel|>",
           "<|turn>", "<turn|>", "<|tool_response>"]  # fmt: skip
MERGES = [("t", "h"), ("th", "e"), ("▁", "the")]
BYTES = [f"<0x{i:02X}>" for i in range(256)]
CHARACTERS = [*string.ascii_letters, *string.digits, *string.punctuation, "\n", "▁"]
VOCABULARY = [*SPECIAL, *BYTES, *CHARACTERS, *(a + b for a, b in MERGES)]
ID = {token: i for i, token in enumerate(VOCABULARY)}
EOS, BOS, END_OF_TURN = ID["<eos>"], ID["<bos>"], ID["<turn|>"]

SIZE = 384  # rows of the table, of which the last ones belong to no token
CONFIG = GemmaConfig(
    vocab_size=SIZE,
    hidden_size=SIZE,
    intermediate_size=SIZE,
    num_hidden_layers=1,
    num_attention_heads=1,
    num_key_value_heads=1,
    num_global_key_value_heads=1,
    head_dim=8,
    global_head_dim=8,
    sliding_window=16,
    layer_types=(FULL,),
    hidden_size_per_layer_input=2,
    vocab_size_per_layer_input=SIZE,
    max_position_embeddings=512,
    dtype="float32",
)


def backend() -> tokenizers.Tokenizer:
    """The tokenizer as the library has it; `save` writes its tokenizer.json."""
    made = tokenizers.Tokenizer(
        models.BPE(vocab=ID, merges=MERGES, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    made.normalizer = normalizers.Replace(" ", "▁")
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    made.add_special_tokens([tokenizers.AddedToken(t, normalized=False) for t in SPECIAL])
    return made


TOKENIZER = Tokenizer(backend())


def chain(*parts: str | int) -> list[int]:
    """Ids that are all different, so that a table can name the successor of each.

    A part is an id, a token ("<eos>"), or text, which is spelt: a character by its own token or,
    where that is taken, by its bytes.
    """
    ids: list[int] = []

    def take(*choices: list[int]) -> None:
        ids.extend(next(c for c in choices if not set(c) & set(ids)))

    for part in parts:
        if isinstance(part, int):
            take([part])
        elif part in ID:
            take([ID[part]])
        else:
            for character in part:
                spelt = [ID[f"<0x{byte:02X}>"] for byte in character.encode()]
                token = ID.get(character.replace(" ", "▁"))
                take(*([[token]] if token is not None else []), spelt)
    return ids


def weights(chains: Iterable[list[int]], damaged: Iterable[int] = ()) -> Params:
    """Weights of the model that continues each chain; what no chain continues ends with <eos>.

    After a token of `damaged` the logits of its row, and of no other, hold NaN.
    """
    successor = np.full(SIZE, EOS)
    for ids in chains:
        successor[ids[:-1]] = ids[1:]
    eye = np.eye(SIZE, dtype=np.float32)
    per_layer = np.zeros((SIZE, 1, 2), np.float32)
    per_layer[list(damaged)] = np.nan
    values = {
        "embed_tokens": eye,
        "embed_tokens_per_layer": per_layer,
        "mlp/gate_up": np.stack([eye, eye], axis=1),
        "mlp/down": eye[successor],
        "post_feedforward_layernorm": np.float32(10),  # the successor outweighs the token itself
        "norm": np.float32(1),
        "pre_feedforward_layernorm": np.float32(1),
        "layer_scalar": np.float32(1),
    }
    shapes = traverse_util.flatten_dict(abstract_params(CONFIG), sep="/")
    leaves = {
        path: np.broadcast_to(values.get(path.removeprefix("layers_0/"), np.float32(0)), s.shape)
        for path, s in shapes.items()
    }
    return traverse_util.unflatten_dict({k: jnp.asarray(v) for k, v in leaves.items()}, sep="/")


def gemma(
    *chains: list[int],
    damaged: Iterable[int] = (),
    tokenizer: Tokenizer | None = TOKENIZER,
    options: Mapping[str, Any] | None = None,
) -> Gemma:
    """The model as a user has it; it stops at <eos> and <turn|>."""
    return Gemma(
        CONFIG,
        weights(chains, damaged),
        tokenizer,
        ChatFormat(empty_thought=False),
        GenerateOptions(stop_token_ids=(EOS, END_OF_TURN), **(options or {})),
        CONFIG.max_position_embeddings,
    )


def write(folder: Path, *chains: list[int]) -> Path:
    """The checkpoint of such a model, as it would be published; returns the folder."""
    (folder / "config.json").write_text(json.dumps(CONFIG.to_dict()))
    stops = {"eos_token_id": [EOS, END_OF_TURN]}
    (folder / "generation_config.json").write_text(json.dumps(stops))
    backend().save(str(folder / "tokenizer.json"))
    params = weights(chains)
    layer = params["layers_0"]
    values = {
        "embed_tokens.weight": params["embed_tokens"],
        "norm.weight": params["norm"],
        "mlp.gate_proj.weight": layer["mlp"]["gate_up"][:, 0].T,
        "mlp.up_proj.weight": layer["mlp"]["gate_up"][:, 1].T,
        "mlp.down_proj.weight": layer["mlp"]["down"].T,
        "pre_feedforward_layernorm.weight": layer["pre_feedforward_layernorm"],
        "post_feedforward_layernorm.weight": layer["post_feedforward_layernorm"],
        "layer_scalar": layer["layer_scalar"],
    }
    shapes = random_checkpoints.tensor_shapes(dataclasses.asdict(CONFIG), "")
    tensors = {
        f"model.{name}": np.ascontiguousarray(
            np.broadcast_to(values.get(name.removeprefix("layers.0."), np.float32(0)), shape)
        )
        for name, shape in shapes.items()
    }
    save_file(tensors, folder / "model.safetensors")
    return folder
