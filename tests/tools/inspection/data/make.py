"""Makes the v5e_*.hlo and h100_*.hlo files here, without a TPU or a GPU; tests need neither.

python make.py tpu: needs libtpu. python make.py gpu: needs JAX for CUDA.
"""

import os
import re
import sys
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from crossshard.tools.inspection.hlo import end_of_bracket
from crossshard.tools.planning import topology

# Of GPUs as by default, and so that no two gradients are combined.
OPTIONS = {"default": {}, "apart": {"xla_gpu_reduce_scatter_combine_threshold_bytes": 1}}


def sharded(axes: tuple[str, ...], over: int) -> Any:
    """Layers whose gradients are scattered over the first axis of a mesh, of this size."""

    def loss(params: Any, x: Any) -> Any:
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    def update(w: Any, g: Any) -> Any:
        g = lax.psum_scatter(g, axes[0], tiled=True) / over
        if axes[1:]:
            g = lax.pmean(g, axes[1:])
        start = lax.axis_index(axes[0]) * g.shape[0]
        part = lax.dynamic_slice_in_dim(w, start, g.shape[0]) - 0.1 * g
        return lax.all_gather(part, axes[0], tiled=True)

    def step(params: Any, x: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, x)
        return [update(w, g) for w, g in zip(params, grads, strict=True)], lax.pmean(value, axes)

    return step


def exchanges(axis: str, size: int) -> Any:
    def step(x: Any) -> Any:
        ring = [(i, (i + 1) % size) for i in range(size)]
        turned = lax.scan(lambda c, _: (c + lax.psum(c @ c.T @ c, axis), None), x, length=5)[0]
        exchanged = lax.all_to_all(x, axis, 0, 0, tiled=True)
        return lax.ppermute(x, axis, ring), exchanged, turned, lax.all_gather(x, axis, tiled=True)

    return step


def lowered(step: Any, mesh: Mesh, specs: Any, out: Any, *args: Any) -> Any:
    """The step for types of float32 that lie by their specs."""
    given = lambda spec, shape: jax.ShapeDtypeStruct(
        shape, jnp.float32, sharding=NamedSharding(mesh, spec)
    )
    types = jax.tree.map(given, specs, args, is_leaf=lambda x: isinstance(x, P))
    mapped = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False)
    return jax.jit(mapped, donate_argnums=0).lower(*types)


def layers(mesh: Mesh, number: int, width: int, rows: int) -> Any:
    axes = mesh.axis_names
    shapes = [(width, width)] * number, (rows * mesh.size, width)
    step = sharded(axes, mesh.shape[axes[0]])
    return lowered(step, mesh, ([P()] * number, P(axes)), P(), *shapes)


def save(name: str, text: str) -> None:
    # How a device goes about it is most of the text, and none of what is read but `is_sync`.
    while found := re.search(r", backend_config=\{(?!\"is)", text):
        end = end_of_bracket(text, found.end() - 1)
        sync = re.search(r'"is_sync":\w+', text[found.end() : end])
        kept = f', backend_config={{"is_sync"{sync[0][9:]}}}' if sync else ""
        text = text[: found.start()] + kept + text[end:]
    text = re.sub(r", frontend_attributes=\{arg_layout[^}]*\}", "", text)
    here = Path(__file__)
    (here.parent / f"{name}.hlo").write_text(text.replace(str(here.resolve()), "step.py"))


if __name__ == "__main__" and sys.argv[1] == "tpu":
    chips = topology("v5e:4x4")
    grid = Mesh(np.array(chips.devices).reshape(4, 4), ("a", "b"))
    save("v5e_4x4_axis", layers(grid, 2, 2048, 4).compile().as_text())
    line = chips.mesh({"a": 16})
    made = lowered(exchanges("a", 16), line, (P("a"),), (P("a"),) * 4, (256, 1024))
    save("v5e_4x4_exchanges", made.compile().as_text())
elif __name__ == "__main__":
    program = layers(topology("h100:1x8").mesh({"shards": 8}), 4, 1024, 256)
    for name, options in OPTIONS.items():
        save(f"h100_8_{name}", program.compile(compiler_options=options).as_text())
