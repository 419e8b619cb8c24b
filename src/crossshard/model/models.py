"""Models: split one into trained and frozen arrays, other state and structure, and back."""

import contextlib
import dataclasses
import inspect
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from crossshard import _check
from crossshard._check import is_inexact
from crossshard._flax import nnx
from crossshard.errors import ArgumentError, ArgumentTypeError, VariableError
from crossshard.gradients.status import inside_optimizer
from crossshard.jaxprs.walk import depends, is_identity
from crossshard.model.model_state import OVERWRITTEN
from crossshard.pipeline.update.optimize import takes_loss
from crossshard.shards.cut import param_name

_WRITE = (
    "Write an NNX filter, such as nnx.LoRAParam, for an NNX module, or a function of path and "
    "leaf, such as wrt=lambda path, leaf: path[0].key == 'head', for a pytree."
)


@dataclasses.dataclass(frozen=True)
class Skeleton:
    """The static part of a model; hashable, so that a step compiles once for each."""

    tree: Any  # the treedef of a pytree, or the graphdef of an NNX module
    fixed: tuple[Any, ...] | None = None  # a pytree's static leaves, ``None`` in place of arrays
    # The paths of the parameters of an NNX module that are not trained.
    frozen: frozenset[tuple[Any, ...]] = frozenset()

    def __hash__(self) -> int:
        # Attributes of a module may have no hash, such as lists: they are compared alone.
        with contextlib.suppress(TypeError):
            return hash((self.tree, self.fixed, self.frozen))
        return hash(self.frozen)

    @property
    def is_nnx(self) -> bool:
        """Whether the model is an NNX module, whose other state a loss may write to."""
        return self.fixed is None

    def split(self, module: Any) -> Any:
        """Split an NNX module into graphdef, trained parameters, frozen ones, and other state."""
        is_trained = lambda path, value: _is_param(path, value) and path not in self.frozen
        filters: Any = (is_trained, _is_param, ...)
        return nnx.split(module, *filters)


def partition(model: Any, wrt: Any = None) -> tuple[Any, ...]:
    """Partition a pytree or an NNX module into skeleton, parameters, frozen arrays and state.

    Parameters are the ``nnx.Param``s of a module, or the floating arrays of a pytree, that ``wrt``
    chooses. The others are frozen, as are the other arrays of a pytree, such as integers. Only a
    module has further state.
    """
    # Looked up at each call, since Flax may be loaded between two of them.
    kinds = nnx.Pytree | nnx.Variable
    is_nnx = lambda leaf: isinstance(leaf, kinds)
    inside = [leaf for leaf in jax.tree.leaves(model, is_leaf=is_nnx) if is_nnx(leaf)]
    trained = nnx.Param if isinstance(model, nnx.State) else ()
    others = [leaf for leaf in inside if not isinstance(leaf, trained)]
    if others and not isinstance(model, nnx.Pytree):
        raise ArgumentTypeError(
            f"Parameters are a pytree of arrays, one module, or an nnx.State of nnx.Param alone; "
            f"got {type(model).__name__} with an nnx {type(others[0]).__name__} in it, which would "
            f"be trained. Put everything into one nnx.Module, or split a state off: graphdef, "
            f"params, rest = nnx.split(model, nnx.Param, ...)."
        )
    of = _partition_module if isinstance(model, nnx.Pytree) else _partition_pytree
    parts = of(model, _chooser(wrt, model))
    if jax.tree.leaves(parts[1]):
        return parts
    if wrt is None:
        raise ArgumentError(
            f"There is nothing to train: {type(model).__name__} has no floating array."
        )
    names = [param_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(parts[2])]
    raise ArgumentError(
        f"wrt chooses none of the model's parameters, of which the first is "
        f"{(names or ['params'])[0]}, so there is nothing to train. {_WRITE}"
    )


def check_params(
    model: Any,
    params: Any,
    optimizer: optax.GradientTransformationExtraArgs,
    wrt: Any,
) -> None:
    """Raise if a step would train arrays that are not meant to be trained.

    These are a state, Linen's other collections, or the base of a model with LoRA. ``model`` is
    what the caller passes to ``init``, and ``params`` are its parameters.
    """
    _refuse_states(model)
    if wrt is not None:
        return
    paths = jax.tree_util.tree_leaves_with_path(params)
    if isinstance(model, Mapping) and not isinstance(model, nnx.State) and "params" in model:
        of_params = jax.tree_util.DictKey("params")
        others = [place for place, (path, _) in enumerate(paths) if path[0] != of_params]
        if others and _moves(optimizer, params, others):
            # Only with a loss over the batch are the values of this collection one device's.
            over = ", loss_over='batch'" * (OVERWRITTEN in model)
            raise ArgumentError(
                f"The parameters are a dict with 'params' in it, as Linen's variables, and the "
                f"optimizer would also train {sorted(set(model) - {'params'})}. Write "
                f"init(variables.pop('params'), model_state=variables), with "
                f"make_train_step(loss_fn, optimizer, model_state='mean'{over}); or, to train "
                f"everything, wrt=lambda path, leaf: True."
            )
    if isinstance(model, nnx.Pytree):
        of_lora = [
            isinstance(variable, nnx.LoRAParam)
            for variable in jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, nnx.Variable))
            for _ in jax.tree.leaves(variable)
        ]
        others = [place for place, is_lora in enumerate(of_lora) if not is_lora]
        if any(of_lora) and others and _moves(optimizer, params, others):
            name = param_name(paths[others[0]][0])
            raise ArgumentError(
                f"The model has nnx.LoRAParam, and the optimizer would also train others, such as "
                f"{name}. To train only nnx.LoRAParam, write make_train_step(..., "
                f"wrt=nnx.LoRAParam); to train all of them, wrt=nnx.Param."
            )


def _refuse_states(model: Any) -> None:
    """Raise if a pytree holds a state among its parameters, whose arrays would be trained."""
    equinox = sys.modules.get("equinox")
    of_equinox = equinox.nn.State if equinox is not None else ()
    of_optax = lambda node: type(node).__module__.startswith("optax.")
    is_state = lambda node: isinstance(node, of_equinox) or of_optax(node)
    for node in filter(is_state, jax.tree.leaves(model, is_leaf=is_state)):
        if jax.tree.leaves(node):
            what, instead = "an eqx.nn.State", "init(model, model_state=state)"
            if of_optax(node):
                what, instead = "an optimizer state", "init(state.params), of the parameters alone"
            raise ArgumentError(
                f"The parameters hold {what}, {type(node).__name__}, whose arrays would be "
                f"trained. Write {instead}."
            )


def _moves(
    optimizer: optax.GradientTransformationExtraArgs, params: Any, places: list[int]
) -> bool:
    """Return whether an optimizer updates the leaves at these places; ``set_to_zero`` does not."""

    def updates(gradients: Any, params: Any) -> list[Any]:
        extra_args = {"value": 0.0} if takes_loss(optimizer) else {}
        with inside_optimizer():
            result, _ = optimizer.update(gradients, optimizer.init(params), params, **extra_args)
        leaves = jax.tree.leaves(result)
        return [leaves[place] for place in places]

    return depends(updates, params, params)


def combine(skeleton: Skeleton, params: Any, frozen: Any, model_state: Any) -> Any:
    """Invert ``partition``."""
    if skeleton.fixed is None:
        # New variables belong to the current trace, so that the loss may write to them.
        return nnx.merge(skeleton.tree, *jax.tree.map(lambda x: x, (params, frozen, model_state)))
    leaves = zip(
        skeleton.fixed,
        skeleton.tree.flatten_up_to(params),
        skeleton.tree.flatten_up_to(frozen),
        strict=True,
    )
    filled = [
        fixed.value if fixed is not None else other if param is None else param
        for fixed, param, other in leaves
    ]
    return skeleton.tree.unflatten(filled)


def after_loss(skeleton: Skeleton, model: Any, params: Any, before: Any) -> tuple[Any, Any]:
    """Return the parameters, trained and frozen, and the other state of a model after the loss.

    ``model`` is the one that the loss got; ``params`` and ``before`` are both before the loss.
    """
    if not skeleton.is_nnx:
        return params, before
    _, trained, frozen, after = skeleton.split(model)
    written = trained, frozen
    if jax.tree.structure((written, after)) != jax.tree.structure((params, before)):
        raise VariableError(
            "The loss added or removed variables of its module, but a step keeps those that init "
            "got. Create them before init, or pop them in the loss."
        )
    return written, after


def check_not_written(after: Any, params: Any, run: Callable[[Any], Any]) -> None:
    """Raise if the loss wrote to the parameters; ``run`` takes them as they were before it."""
    if all(a is b for a, b in zip(*map(jax.tree.leaves, (after, params)), strict=True)):
        return
    # nnx.remat, nnx.jit and similar write every variable back, with its old value.
    if not is_identity(run, params):
        raise VariableError(
            "The loss wrote to an nnx.Param of its module, which only the optimizer updates: the "
            "value would be lost. Write it in the optimizer, with optax.keep_params_nonnegative "
            "for example, or use another type of nnx.Variable. Of a layer that does so itself, as "
            "nnx.WeightNorm, call a copy in the loss, nnx.clone(model): what that writes is lost."
        )


def _is_param(path: Any, value: Any) -> bool:
    del path
    leaves = jax.tree.leaves(value.get_raw_value()) if isinstance(value, nnx.Param) else []
    return bool(leaves) and all(map(is_inexact, leaves))


def _partition_module(module: Any, chosen: Callable[..., bool]) -> tuple[Any, ...]:
    frozen = set()
    _check_arrays(nnx.state(module))
    for path, variable in nnx.to_flat_state(nnx.state(module)):
        is_chosen = chosen(path, variable)
        if _is_param(path, variable):
            frozen |= set() if is_chosen else {path}
        elif is_chosen and any(map(is_inexact, jax.tree.leaves(variable.get_raw_value()))):
            raise ArgumentError(
                f"wrt chooses {'/'.join(map(str, path))}, an nnx {type(variable).__name__}, but a "
                f"step trains only nnx.Params. Write wrt=nnx.All(nnx.Param, ...), or derive the "
                f"variable's type from nnx.Param."
            )
    skeleton = Skeleton(None, frozen=frozenset(frozen))
    graph, *arrays = skeleton.split(module)
    return dataclasses.replace(skeleton, tree=graph), *arrays


@dataclasses.dataclass(frozen=True)
class _Fixed:
    value: Any
    # 1, 1.0 and True compare equal, but need different programs.
    kind: type


def _partition_pytree(model: Any, chosen: Callable[..., bool]) -> tuple[Any, ...]:
    paths, tree = jax.tree_util.tree_flatten_with_path(model)
    _check_arrays(model)
    params: list[Any] = []
    rest: list[Any] = []
    fixed: list[_Fixed | None] = []
    for path, x in paths:
        leaf = jnp.asarray(x) if _is_number_to_train(path, x) else x
        is_array = _is_array(leaf)
        is_trained = is_array and is_inexact(leaf) and chosen(path, leaf)
        params.append(leaf if is_trained else None)
        rest.append(leaf if is_array and not is_trained else None)
        fixed.append(None if is_array else _fixed(leaf))
    return Skeleton(tree, tuple(fixed)), tree.unflatten(params), tree.unflatten(rest), ()


def _is_number_to_train(path: tuple[Any, ...], leaf: Any) -> bool:
    # A float in a dict or list is a parameter; in a module's field it is static.
    of_container = jax.tree_util.DictKey | jax.tree_util.SequenceKey
    return isinstance(leaf, float) and (not path or isinstance(path[-1], of_container))


def _fixed(leaf: Any) -> _Fixed:
    try:
        hash(leaf)
    except TypeError:
        raise ArgumentTypeError(
            f"A leaf of the parameters is neither an array nor hashable: {_check.described(leaf)}."
        ) from None
    return _Fixed(leaf, type(leaf))


def _check_arrays(tree: Any) -> None:
    # Leaves that are no arrays are static.
    arrays = jax.tree.map(lambda leaf: leaf if _is_array(leaf) else None, tree)
    _check.arrays("params", arrays, or_types=True)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct)


# Which parameters are trained.


def check_wrt(wrt: Any) -> Any:
    """Return the checked ``wrt``: ``None``, an NNX filter, or a function of path and leaf."""
    if wrt is None:
        return None
    if _is_nnx_filter(wrt):
        try:
            nnx.filterlib.to_predicate(wrt)
        except (TypeError, ValueError):
            raise ArgumentTypeError(
                f"wrt={_check.shown(wrt)} holds what NNX cannot filter by."
            ) from None
        return wrt
    if not callable(wrt):
        raise ArgumentTypeError(f"wrt is {_check.described(wrt)}. {_WRITE}")
    try:
        inspect.signature(wrt).bind(None, None)
    except TypeError:
        raise ArgumentTypeError(f"wrt is a function of other arguments. {_WRITE}") from None
    except ValueError:  # a built-in function without a signature
        pass
    return wrt


def _chooser(wrt: Any, model: Any) -> Callable[[Any, Any], bool]:
    """Return a function that tells whether ``wrt`` chooses a leaf, or an NNX variable."""
    is_module = isinstance(model, nnx.Pytree)
    if wrt is None:
        return _is_param if is_module else lambda path, leaf: True
    if _is_nnx_filter(wrt) and not is_module:
        raise ArgumentTypeError(
            f"wrt={_check.shown(wrt)} is an NNX filter, which chooses variables of an NNX module, "
            f"but the parameters are a pytree ({type(model).__name__}). {_WRITE}"
        )
    chooses = nnx.filterlib.to_predicate(wrt) if is_module else wrt

    def chosen(path: Any, leaf: Any) -> bool:
        answer = chooses(path, leaf)
        if not isinstance(answer, bool | np.bool_):
            raise ArgumentTypeError(
                f"wrt must return True or False for each leaf; it returned "
                f"{_check.shown(answer, 40)} ({type(answer).__name__})."
            )
        return bool(answer)

    return chosen


def _is_nnx_filter(wrt: Any) -> bool:
    kinds = type | str | bool | types.EllipsisType | list | tuple
    return isinstance(wrt, kinds) or type(wrt).__module__ == nnx.filterlib.__name__
