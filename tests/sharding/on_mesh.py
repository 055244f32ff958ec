"""Parameters that are here already, as they lie on a mesh."""

import jax

from carat_jax import sharding
from carat_jax.model import Params
from carat_jax.sharding import MeshParams


def on_mesh(params: Params, mesh: jax.sharding.Mesh) -> MeshParams:
    places = sharding.stored(params, mesh)
    put = jax.tree.map(lambda x, place: jax.device_put(x, place.sharding), params, places)
    return sharding.spread(put, mesh)
