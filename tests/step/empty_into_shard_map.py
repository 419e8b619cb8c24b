"""JAX 0.11.2 dies while it compiles this: an array without elements that a shard_map reads.

    python tests/step/empty_into_shard_map.py

Shardy, of that jaxlib alone, does; 0.10.2, 0.11.0, 0.11.1 and 0.12.0 print [2. 2. 2. 2.].
"""

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

mesh = jax.make_mesh((2,), ("s",), axis_types=(AxisType.Auto,))
run = lambda empty, x: 2 * x + empty.sum()
mapped = jax.shard_map(run, mesh=mesh, in_specs=(P(), P()), out_specs=P(), check_vma=False)
print(jax.jit(mapped)(jnp.zeros(0), jnp.ones(4)))
