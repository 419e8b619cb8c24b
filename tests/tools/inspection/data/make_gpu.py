"""Makes the h100_*.hlo files here, without a GPU; needs `jax[cuda12]`, as in .venvs/gpus."""

import os
import re
from pathlib import Path
from typing import Any

os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from benchmarks.gpus import cluster

LAYERS, WIDTH, ROWS = 4, 1024, 256
# As by default, and so that no two gradients are combined.
OPTIONS = {"default": {}, "apart": {"xla_gpu_reduce_scatter_combine_threshold_bytes": 1}}


def sharded(params: Any, x: Any) -> Any:
    def loss(params: Any) -> Any:
        hidden = x
        for w in params:
            hidden = jnp.tanh(hidden @ w)
        return jnp.mean(hidden**2)

    def update(w: Any, g: Any) -> Any:
        g = lax.psum_scatter(g, "shards", tiled=True)
        start = lax.axis_index("shards") * g.shape[0]
        part = lax.dynamic_slice_in_dim(w, start, g.shape[0]) - 0.1 * g
        return lax.all_gather(part, "shards", tiled=True)

    value, grads = jax.value_and_grad(loss)(params)
    return [update(w, g) for w, g in zip(params, grads, strict=True)], lax.pmean(value, "shards")


def main() -> None:
    mesh = cluster(1)
    step = jax.shard_map(
        sharded, mesh=mesh, in_specs=(P(), P("shards")), out_specs=P(), check_vma=False
    )
    params = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * LAYERS
    batch = jax.ShapeDtypeStruct((ROWS * mesh.size, WIDTH), jnp.float32)
    lowered = jax.jit(step, donate_argnums=0).lower(params, batch)
    for name, options in OPTIONS.items():
        text = lowered.compile(compiler_options=options).as_text()
        # The lines of the step, and how a kernel is launched, are most of the text.
        text = re.sub(
            r"^(FileNames|FunctionNames|FileLocations|StackFrames)\n.*?\n\n",
            "",
            text,
            flags=re.M | re.S,
        )
        text = re.sub(r", metadata=\{[^}]*\}", "", text)
        text = re.sub(r", backend_config=(\{.*\})", lambda m: _sync(m[1]), text)
        (Path(__file__).parent / f"h100_8_{name}.hlo").write_text(text)


def _sync(config: str) -> str:
    """What is read of an instruction's configuration."""
    found = re.search(r'"is_sync":\w+', config)
    return f', backend_config={{"collective_backend_config":{{{found[0]}}}}}' if found else ""


if __name__ == "__main__":
    main()
