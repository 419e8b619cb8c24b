"""Makes the *.hlo files here: TPU programs, compiled without a TPU; needs libtpu, tests do not."""

import os
import re
from pathlib import Path
from typing import Any

os.environ["TPU_SKIP_MDS_QUERY"] = "1"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import topologies
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from crossshard.tools.inspection.hlo import end_of_bracket

# name: (topology, mesh, scattered over how many of its axes, width of the two weights)
STEPS = {
    "v5e_4x4_replicated": ("v5e:4x4", (16,), 0, 256),
    "v5e_4x4_flat": ("v5e:4x4", (16,), 1, 1024),
    "v5e_4x4_axis": ("v5e:4x4", (4, 4), 1, 2048),
    "v5e_16x16_axis": ("v5e:16x16", (16, 16), 1, 2048),
    "v5p_4x4x4_flat": ("v5p:4x4x4", (64,), 1, 1024),
}


def loss(params: Any, x: Any, y: Any) -> Any:
    return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"] - y) ** 2)


def replicated(axes: tuple[str, ...], scattered: tuple[str, ...], over: int) -> Any:
    def step(params: Any, momentum: Any, x: Any, y: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, x, y)
        grads = lax.pmean(grads, axes)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
        params = jax.tree.map(jnp.subtract, params, momentum)
        return params, momentum, lax.pmean(value, axes)

    return step


def sharded(axes: tuple[str, ...], scattered: tuple[str, ...], over: int) -> Any:
    rest = tuple(axis for axis in axes if axis not in scattered)

    def update(w: Any, m: Any, g: Any) -> Any:
        g = lax.psum_scatter(g, scattered, tiled=True) / over
        if rest:
            g = lax.pmean(g, rest)
        m = 0.9 * m + g
        length = w.shape[0] // over
        start = lax.axis_index(scattered) * length
        part = lax.dynamic_slice_in_dim(w, start, length) - m
        return lax.all_gather(part, scattered, tiled=True), m

    def step(params: Any, momentum: Any, x: Any, y: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, x, y)
        both = {k: update(params[k], momentum[k], grads[k]) for k in params}
        params, momentum = ({k: pair[i] for k, pair in both.items()} for i in (0, 1))
        return params, momentum, lax.pmean(value, axes)

    return step


def exchanges(axis: str, size: int) -> Any:
    def step(x: Any) -> Any:
        ring = [(i, (i + 1) % size) for i in range(size)]
        turned = lax.scan(lambda c, _: (c + lax.psum(c @ c.T @ c, axis), None), x, length=5)[0]
        exchanged = lax.all_to_all(x, axis, 0, 0, tiled=True)
        return lax.ppermute(x, axis, ring), exchanged, turned, lax.all_gather(x, axis, tiled=True)

    return step


def save(name: str, step: Any, mesh: Any, specs: Any, shapes: Any) -> None:
    args = jax.tree.map(
        lambda shape, spec: jax.ShapeDtypeStruct(
            shape, jnp.float32, sharding=NamedSharding(mesh, spec)
        ),
        shapes,
        specs[0],
        is_leaf=lambda x: isinstance(x, tuple) and all(isinstance(n, int) for n in x),
    )
    mapped = jax.shard_map(step, mesh=mesh, in_specs=specs[0], out_specs=specs[1], check_vma=False)
    text = jax.jit(mapped).lower(*args).compile().as_text()
    # How a TPU goes about it is most of the text, and none of what is read.
    while (start := text.find(", backend_config={")) >= 0:
        text = text[:start] + text[end_of_bracket(text, text.index("{", start)) :]
    text = re.sub(r", frontend_attributes=\{arg_layout[^}]*\}", "", text)
    here = Path(__file__)
    (here.parent / f"{name}.hlo").write_text(text.replace(str(here.resolve()), "step.py"))


def mesh_of(topology: str, shape: tuple[int, ...]) -> Any:
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    return topologies.make_mesh(devices, shape, ("a", "b", "c")[: len(shape)])


if __name__ == "__main__":
    for name, (topology, shape, over, width) in STEPS.items():
        mesh = mesh_of(topology, shape)
        axes, scattered = mesh.axis_names, mesh.axis_names[:over]
        make = sharded if over else replicated
        spec = {"v": P(scattered), "w": P(scattered)}
        weights = {"v": (width, width), "w": (width, width)}
        batch = (4 * int(np.prod(shape)), width)
        save(
            name,
            make(axes, scattered, int(np.prod(shape[:over]))),
            mesh,
            (({"v": P(), "w": P()}, spec, P(axes), P(axes)), ({"v": P(), "w": P()}, spec, P())),
            (weights, weights, batch, batch),
        )
    mesh = mesh_of("v5e:4x4", (16,))
    one = ((P("a"),), (P("a"),) * 4)
    save("v5e_4x4_exchanges", exchanges("a", 16), mesh, one, ((256, 1024),))
