"""One of two processes that run a model together; prints the tokens of two rows as JSON.

python one_of_two.py PORT PROCESS DATA MODEL NEW_TOKENS
"""

import json
import sys
from pathlib import Path

import jax
import numpy as np

import carat_jax as carat
from carat_jax.speculative import Ngram

FOLDER = Path(__file__).parents[1] / "fixtures" / "dense_31b_like"


def main(port: str, process: str, data: str, model: str, new: str) -> None:
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_disable_most_optimizations", True)
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(process))
    mesh = carat.mesh(data=int(data), model=int(model))
    assert {d.process_index for d in mesh.devices.flat} == {0, 1}
    gemma = carat.load(FOLDER, mesh=mesh, progress=False)
    ids = np.load(FOLDER / "expected.npz")["prompt_ids"]
    options = {"max_new_tokens": int(new), "temperature": 0, "stop_token_ids": []}
    rows = gemma.generate([ids, ids], drafter=Ngram() if int(new) > 1 else None, **options)
    print(json.dumps([row.tokens for row in rows]))


if __name__ == "__main__":
    main(*sys.argv[1:])
