"""What the steps that tests read are made of: meshes, how they are lowered, bytes by hand."""

import math
from collections.abc import Callable
from typing import Any

import jax
import optax
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


def mesh_of(**axes: int) -> Mesh:
    devices = jax.devices()[: math.prod(axes.values())]
    auto = (AxisType.Auto,) * len(axes)
    return jax.make_mesh((*axes.values(),), (*axes,), axis_types=auto, devices=devices)


LINE = mesh_of(s=8)
WHOLE, SPLIT = P(), P("s")


# What a device of n sends of an array of so many bytes, all n pieces of it together.
def summed(n: int, whole: float) -> float:
    return 2 * (n - 1) / n * whole


def moved(n: int, whole: float) -> float:
    """Scattered, gathered or exchanged: all but its own piece."""
    return (n - 1) / n * whole


def mean(tree: Any) -> Any:
    return lax.pmean(tree, "s")


def gather(x: Any, axis: str = "s", along: int = 0) -> Any:
    return lax.all_gather(x, axis, axis=along, tiled=True)


def scatter(x: Any) -> Any:
    return lax.psum_scatter(x, "s", tiled=True)


def first_params() -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(0))
    return {"a": jax.random.normal(keys[0], (4, 6)), "b": jax.random.normal(keys[1], (6,))}


def updated(rule: Any, params: Any, state: Any, grads: Any) -> Any:
    updates, state = rule.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def over(step: Callable, specs: Any, out: Any, mesh: Mesh = LINE, vma: bool = False) -> Any:
    return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=out, check_vma=vma))


def placed(tree: Any, specs: Any, mesh: Mesh = LINE) -> Any:
    """The types of arrays that lie so; one spec may stand for all of a tree."""
    given = lambda x, spec: jax.ShapeDtypeStruct(
        x.shape, x.dtype, sharding=NamedSharding(mesh, spec)
    )
    if isinstance(specs, P):
        return jax.tree.map(lambda x: given(x, specs), tree)
    return jax.tree.map(given, tree, specs)
