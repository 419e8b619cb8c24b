"""Steps as one would write them by hand with JAX and Optax, lowered from shapes only."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.problem import adamw

AXIS = "shards"
_WHOLE = PartitionSpec()
# Arrays of fewer numbers, such as scales, are not split where parameters are.
_SMALL = 1 << 16
# XLA's number of its optimization level O1.
O1 = {"optimization_level": 19}
# The flags of MaxText for FSDP on 1,024 H100s: src/maxtext/configs/gpu/a3/llama_3.1_405b/128vm.sh.
# Left out is where it dumps programs to.
MAXTEXT = {
    "xla_gpu_enable_latency_hiding_scheduler": True,
    "xla_gpu_enable_triton_gemm": False,
    "xla_gpu_enable_command_buffer": "",
    "xla_gpu_enable_highest_priority_async_stream": True,
    "xla_gpu_all_reduce_combine_threshold_bytes": 1 << 30,
    "xla_gpu_all_gather_combine_threshold_bytes": 1 << 27,
    "xla_gpu_reduce_scatter_combine_threshold_bytes": 1 << 27,
    "xla_gpu_enable_pipelined_all_gather": True,
    "xla_gpu_enable_pipelined_reduce_scatter": True,
    "xla_gpu_enable_pipelined_all_reduce": True,
    "xla_gpu_enable_while_loop_double_buffering": True,
    "xla_gpu_enable_all_gather_combine_by_dim": False,
    "xla_gpu_enable_reduce_scatter_combine_by_dim": False,
    "xla_disable_hlo_passes": "rematerialization",
}


def replicated(
    mesh: Mesh, params: Any, loss_fn: Callable[[Any, Any], jax.Array], batch: Any
) -> jax.stages.Lowered:
    """All-reduce the gradients, update on every shard."""
    optimizer = adamw()

    def step(params: Any, state: Any, batch: Any) -> Any:
        gradients = lax.pmean(jax.grad(loss_fn)(params, batch), AXIS)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    state = jax.eval_shape(optimizer.init, params)
    return _lowered(mesh, step, params, state, batch)


def sharded(
    mesh: Mesh, params: Any, loss_fn: Callable[[Any, Any], jax.Array], batch: Any
) -> jax.stages.Lowered:
    """Scatter each flat gradient over the shards, update a slice, gather the parameters."""
    optimizer, number = adamw(), mesh.size

    def rows(x: Any) -> Any:
        flat = jnp.ravel(x)
        return jnp.pad(flat, (0, -flat.size % number))

    def part(x: Any) -> Any:
        own = rows(x).size // number
        return lax.dynamic_slice_in_dim(rows(x), lax.axis_index(AXIS) * own, own)

    def step(params: Any, state: Any, batch: Any) -> Any:
        gradients = jax.grad(loss_fn)(params, batch)
        scattered = jax.tree.map(
            lambda g: lax.psum_scatter(rows(g), AXIS, tiled=True) / number, gradients
        )
        own = jax.tree.map(part, params)
        updates, state = optimizer.update(scattered, state, own)
        own = optax.apply_updates(own, updates)
        whole = jax.tree.map(
            lambda x, p: lax.all_gather(x, AXIS, tiled=True)[: p.size].reshape(p.shape),
            own,
            params,
        )
        return whole, state

    padded = jax.tree.map(lambda p: jax.eval_shape(rows, p), params)
    state = jax.eval_shape(optimizer.init, padded)
    specs = jax.tree.map(lambda x: PartitionSpec(AXIS) if x.ndim else PartitionSpec(), state)
    return _lowered(mesh, step, params, state, batch, state_specs=specs)


def params_sharded(
    mesh: Mesh, params: Any, loss_fn: Callable[..., jax.Array], batch: Any
) -> jax.stages.Lowered:
    """Keep the parameters sharded, gather those of a layer in bfloat16 where it reads them.

    The transpose of a gather is the scatter of the sum, in float32. Small arrays are whole.

    Args:
      mesh: of one axis.
      params: the types of the whole parameters.
      loss_fn: the loss of the parameters, the batch, and a function from a layer's parts and input
        to what it computes with.
      batch: the type of the batch.
    """
    optimizer, number = adamw(), mesh.size

    def gather(layer: Any, x: Any) -> Any:
        return _over_parts(lambda part: _gathered(part.array, part.axis), lambda x: x, layer), x

    def step(params: Any, state: Any, batch: Any) -> Any:
        gradients = jax.grad(loss_fn)(params, batch, gather)
        gradients = _over_parts(lambda x: x, lambda x: lax.psum(x, AXIS), gradients)
        gradients = jax.tree.map(lambda x: x / number, gradients)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    def marked(x: jax.ShapeDtypeStruct) -> Any:
        axis = _split_axis(x, number)
        return x if axis is None else _Part(x, axis)

    params = jax.tree.map(marked, params)
    state = jax.eval_shape(optimizer.init, params)
    specs = lambda tree: _over_parts(lambda x: spec(x.array, number), lambda _: _WHOLE, tree)
    return _lowered(mesh, step, params, state, batch, specs(params), specs(state))


def gspmd(
    mesh: Mesh,
    params: Any,
    loss_fn: Callable[..., jax.Array],
    batch: Any,
    *,
    split_params: bool = False,
    options: Mapping[str, Any] | None = None,
) -> jax.stages.Lowered:
    """The step of the whole batch, which XLA partitions: ZeRO-1, or FSDP with split parameters.

    Args:
      mesh: of one axis, over which the batch and the optimizer state are split.
      params: the types of the parameters.
      loss_fn: the loss of the parameters, the batch, and a function from a layer's parameters and
        input to what it computes with. Without such a constraint on the input, XLA splits a loop's
        activations as the parameters are, and sends 16 times as much.
      batch: the type of the batch.
      split_params: whether the parameters are split as the optimizer state is.
      options: the compiler options.
    """
    optimizer = adamw()

    def by_rows(layer: Any, x: Any) -> Any:
        return layer, lax.with_sharding_constraint(x, rows)

    def step(params: Any, state: Any, batch: Any) -> Any:
        gradients = jax.grad(loss_fn)(params, batch, by_rows)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    def split(tree: Any) -> Any:
        return jax.tree.map(lambda x: NamedSharding(mesh, spec(x, mesh.size)), tree)

    state = jax.eval_shape(optimizer.init, params)
    whole, rows = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), (AXIS,)))
    kept = (split(params) if split_params else whole, split(state))
    run = jax.jit(
        step,
        in_shardings=(*kept, rows),
        out_shardings=kept,
        donate_argnums=(0, 1),
        compiler_options=None if options is None else dict(options),
    )
    return run.lower(params, state, batch)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Part:
    """A parameter that is split along an axis, which counts from the last."""

    array: Any
    axis: int = dataclasses.field(metadata={"static": True})


def _over_parts(of_part: Callable[[Any], Any], of_whole: Callable[[Any], Any], tree: Any) -> Any:
    is_part = lambda x: isinstance(x, _Part)
    return jax.tree.map(lambda x: of_part(x) if is_part(x) else of_whole(x), tree, is_leaf=is_part)


def _split_axis(x: Any, number: int) -> int | None:
    """The first of the last two axes that divides: layers may be stacked along one before."""
    axes = range(-min(x.ndim, 2), 0) if x.size >= _SMALL else ()
    return next((axis for axis in axes if x.shape[axis] % number == 0), None)


def spec(x: Any, number: int) -> PartitionSpec:
    """How an array is split into this many parts; a small one is whole."""
    axis = _split_axis(x, number)
    names = [AXIS if place - x.ndim == axis else None for place in range(x.ndim)]
    return PartitionSpec(*names)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gathered(part: jax.Array, axis: int) -> jax.Array:
    return lax.all_gather(part.astype(jnp.bfloat16), AXIS, axis=part.ndim + axis, tiled=True)


def _gathered_forward(part: jax.Array, axis: int) -> tuple[jax.Array, None]:
    return _gathered(part, axis), None


def _gathered_backward(axis: int, _: None, gradient: jax.Array) -> tuple[jax.Array]:
    wide, place = gradient.astype(jnp.float32), gradient.ndim + axis
    return (lax.psum_scatter(wide, AXIS, scatter_dimension=place, tiled=True),)


_gathered.defvjp(_gathered_forward, _gathered_backward)


def _lowered(
    mesh: Mesh,
    step: Callable[..., Any],
    params: Any,
    state: Any,
    batch: Any,
    params_specs: Any = _WHOLE,
    state_specs: Any = _WHOLE,
) -> jax.stages.Lowered:
    kept = (params_specs, state_specs)
    run = jax.shard_map(
        step, mesh=mesh, in_specs=(*kept, PartitionSpec(AXIS)), out_specs=kept, check_vma=False
    )
    return jax.jit(run, donate_argnums=(0, 1)).lower(params, state, batch)
