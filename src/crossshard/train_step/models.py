"""What a loss takes, partitioned and combined: parameters, model state, and what never changes."""

import dataclasses
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from crossshard.errors import ArgumentError, ArgumentTypeError, VariableError
from crossshard.gradients.nesting import inside_optimizer
from crossshard.gradients.scalars import is_inexact
from crossshard.jaxprs.dependence import depends, hands_on
from crossshard.pipeline.optimize import takes_value


@dataclasses.dataclass(frozen=True)
class Skeleton:
    """All of a model that is not an array; hashable, so that a step compiles once for each.

    Attributes:
      tree: of a pytree, its structure; of an NNX module, its graph.
      fixed: of a pytree, per leaf its value if it is not an array, and ``None`` if it is one.
    """

    tree: Any
    fixed: tuple[Any, ...] | None = None

    @property
    def is_nnx(self) -> bool:
        """Whether the model is an NNX module, whose other state a loss may write to."""
        return self.fixed is None


def partition(model: Any) -> tuple[Skeleton, Any, Any]:
    """The skeleton, the parameters and the model state of a pytree or an NNX module.

    Of a module the parameters are its ``nnx.Param``s; of a pytree, its floating arrays. The other
    arrays are model state; those of a pytree, such as integers, are carried along unchanged.

    Raises:
      ArgumentError: there are no parameters.
      ArgumentTypeError: a leaf that is neither an array nor hashable.
    """
    inside = [leaf for leaf in jax.tree.leaves(model, is_leaf=_is_nnx) if _is_nnx(leaf)]
    if isinstance(model, nnx.State):
        others = [leaf for leaf in inside if not isinstance(leaf, nnx.Param)]
        if others:
            raise ArgumentTypeError(
                f"An nnx.State that is trained has nnx.Param alone; this one has an nnx "
                f"{type(others[0]).__name__} too. Split it off: graphdef, params, rest = "
                f"nnx.split(model, nnx.Param, ...)."
            )
    elif inside and not isinstance(model, nnx.Pytree):
        raise ArgumentTypeError(
            f"Parameters are a pytree of arrays, or one module; got {type(model).__name__} with an "
            f"nnx {type(inside[0]).__name__} in it, whose statistics would be taken for "
            f"parameters. Put all of it into one nnx.Module, or into nnx.Dict or nnx.List."
        )
    parts = _partition_module(model) if isinstance(model, nnx.Pytree) else _partition_pytree(model)
    if not jax.tree.leaves(parts[1]):
        raise ArgumentError(
            f"There is nothing to train: {type(model).__name__} has no floating array."
        )
    return parts


def check_params(model: Any, params: Any, optimizer: optax.GradientTransformationExtraArgs) -> None:
    """Raise where a step would train what is not meant to be, or lay out otherwise what is split.

    Args:
      model: what ``init`` was given.
      params: its parameters.
      optimizer: the wrapped optimizer.

    Raises:
      ArgumentError: parameters that lie split over devices; Linen's other collections, or the base
        of a model with LoRA, that the optimizer would move.
    """
    _refuse_states(model)
    paths = jax.tree_util.tree_leaves_with_path(params)
    for path, leaf in paths:
        sharding = getattr(leaf, "sharding", None)
        if sharding is not None and not sharding.is_fully_replicated:
            raise ArgumentError(
                f"{_name(path)} lies split over devices ({getattr(sharding, 'spec', sharding)}), "
                f"and in a step every shard has all of every parameter. Give it whole, with "
                f"jax.device_put(params, NamedSharding(mesh, PartitionSpec())). A model that is "
                f"split over an axis takes a CrossShardOptimizer in a jax.shard_map of your own."
            )
    if isinstance(model, Mapping) and not isinstance(model, nnx.State) and "params" in model:
        of_params = jax.tree_util.DictKey("params")
        others = [place for place, (path, _) in enumerate(paths) if path[0] != of_params]
        if others and _moves(optimizer, params, others):
            raise ArgumentError(
                f"The parameters are a dict with 'params' in it, as Linen's variables, and the "
                f"optimizer would train {sorted(set(model) - {'params'})} too. Give "
                f"init(variables['params']) and let the loss close over what does not change; "
                f"statistics that do are kept of an NNX module, as nnx.bridge.ToNNX makes them. To "
                f"train all of it, choose another name than 'params'."
            )
    if isinstance(model, nnx.Pytree):
        of_lora = [
            isinstance(variable, nnx.LoRAParam)
            for variable in jax.tree.leaves(params, is_leaf=_is_nnx)
            for _ in jax.tree.leaves(variable)
        ]
        others = [place for place, is_lora in enumerate(of_lora) if not is_lora]
        if any(of_lora) and others and _moves(optimizer, params, others):
            name = _name(paths[others[0]][0])
            raise ArgumentError(
                f"The model has nnx.LoRAParam, and the optimizer would train the other parameters "
                f"too, such as {name}. To train the first alone, write graphdef, lora, rest = "
                f"nnx.split(model, nnx.LoRAParam, ...), then init(lora), and in the loss model = "
                f"nnx.merge(graphdef, lora, rest); to train all of them, split off nnx.Param."
            )


def _refuse_states(model: Any) -> None:
    """Raise if a pytree holds a state among its parameters, whose arrays would be trained."""
    equinox = sys.modules.get("equinox")
    of_equinox = equinox.nn.State if equinox is not None else ()

    def is_state(node: Any) -> bool:
        return isinstance(node, of_equinox) or type(node).__module__.startswith("optax.")

    nodes = filter(is_state, jax.tree.leaves(model, is_leaf=is_state))
    state = next((node for node in nodes if jax.tree.leaves(node)), None)
    if isinstance(state, of_equinox):
        raise ArgumentError(
            "The parameters hold an eqx.nn.State, and its statistics would be trained. Give the "
            "module alone, init(model), and let the loss close over a state that does not change; "
            "statistics that do are kept of an NNX module."
        )
    if state is not None:
        raise ArgumentError(
            f"The parameters, of type {type(model).__name__}, hold an optimizer state, "
            f"{type(state).__name__}, which would be trained. Give the parameters alone, as in "
            f"init(state.params); init makes the optimizer state."
        )


def _name(path: tuple[Any, ...]) -> str:
    # The arrays of NNX's variables are found as `.value`.
    return "params" + jax.tree_util.keystr(path).removesuffix(".value")


def _moves(
    optimizer: optax.GradientTransformationExtraArgs, params: Any, places: list[int]
) -> bool:
    """Whether an optimizer moves the leaves at these places, as ``set_to_zero`` does not."""

    def updates(gradients: Any, params: Any) -> list[Any]:
        extra_args = {"value": 0.0} if takes_value(optimizer) else {}
        with inside_optimizer():
            made, _ = optimizer.update(gradients, optimizer.init(params), params, **extra_args)
        leaves = jax.tree.leaves(made)
        return [leaves[place] for place in places]

    return depends(updates, params, params)


def combine(skeleton: Skeleton, params: Any, model_state: Any) -> Any:
    """The inverse of ``partition``."""
    if skeleton.fixed is None:
        # Variables made anew belong to the trace in force, so that the loss may write to them.
        return nnx.merge(skeleton.tree, *jax.tree.map(lambda x: x, (params, model_state)))
    leaves = zip(
        skeleton.fixed,
        skeleton.tree.flatten_up_to(params),
        skeleton.tree.flatten_up_to(model_state),
        strict=True,
    )
    filled = [
        fixed.value if fixed is not None else other if param is None else param
        for fixed, param, other in leaves
    ]
    return skeleton.tree.unflatten(filled)


def after_loss(skeleton: Skeleton, model: Any, params: Any, before: Any) -> tuple[Any, Any]:
    """The parameters and the model state after the loss.

    Raises:
      VariableError: the model has other variables than before.
    """
    if not skeleton.is_nnx:
        return params, before
    _, written, after = nnx.split(model, _is_param, ...)  # type: ignore[misc]
    if jax.tree.structure((written, after)) != jax.tree.structure((params, before)):
        raise VariableError(
            "The loss made or removed variables of the module that was handed to it; a step "
            "carries those that it had. Make them before, or pop them in the loss."
        )
    return written, after


def check_not_written(after: Any, params: Any, run: Callable[[Any], Any]) -> None:
    """Raise if the loss wrote to the parameters.

    Args:
      after: the parameters after the loss.
      params: those before it.
      run: the loss, from parameters before to parameters after.

    Raises:
      VariableError: it did.
    """
    if all(a is b for a, b in zip(*map(jax.tree.leaves, (after, params)), strict=True)):
        return
    # nnx.remat, nnx.jit and their like hand every variable out anew, with the value that it had.
    if not hands_on(run, params):
        raise VariableError(
            "The loss wrote to an nnx.Param of its module, which the optimizer steps: what was "
            "written would be lost. Let the optimizer do it, with optax.keep_params_nonnegative "
            "for example, or make it an nnx.Variable of another kind."
        )


def _is_nnx(x: Any) -> bool:
    return isinstance(x, nnx.Pytree | nnx.Variable)


def _is_param(path: Any, value: Any) -> bool:
    del path
    leaves = jax.tree.leaves(value.get_raw_value()) if isinstance(value, nnx.Param) else []
    return bool(leaves) and all(map(is_inexact, leaves))


def _partition_module(module: Any) -> tuple[Skeleton, Any, Any]:
    graph, params, model_state = nnx.split(module, _is_param, ...)  # type: ignore[misc]
    return Skeleton(graph), params, model_state


@dataclasses.dataclass(frozen=True)
class _Fixed:
    value: Any
    # 1, 1.0 and True are equal, and no program of one does for another.
    kind: type


def _partition_pytree(model: Any) -> tuple[Skeleton, Any, Any]:
    paths, tree = jax.tree_util.tree_flatten_with_path(model)
    leaves = [jnp.asarray(x) if _is_number_to_train(path, x) else x for path, x in paths]
    fixed = tuple(
        None if _is_array(leaf) else _Fixed(_check_fixed(leaf), type(leaf)) for leaf in leaves
    )
    params = [leaf if _is_array(leaf) and is_inexact(leaf) else None for leaf in leaves]
    rest = [leaf if _is_array(leaf) and not is_inexact(leaf) else None for leaf in leaves]
    return Skeleton(tree, fixed), tree.unflatten(params), tree.unflatten(rest)


def _is_number_to_train(path: tuple[Any, ...], leaf: Any) -> bool:
    # What a dict or list holds is a parameter; a number in a module's own field is a setting.
    of_container = jax.tree_util.DictKey | jax.tree_util.SequenceKey
    return isinstance(leaf, float) and (not path or isinstance(path[-1], of_container))


def _check_fixed(leaf: Any) -> Any:
    try:
        hash(leaf)
    except TypeError:
        raise ArgumentTypeError(
            f"A leaf of the parameters is neither an array nor hashable: {leaf!r:.60} "
            f"({type(leaf).__name__})."
        ) from None
    return leaf


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct)
