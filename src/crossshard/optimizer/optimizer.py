"""The stateful idiom: an Optax rule as an object that writes to NNX variables."""

import contextlib
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

import cloudpickle
import jax
import jax.numpy as jnp
import optax
from flax import nnx

from crossshard.errors import ArgumentError, ArgumentTypeError, VariableError
from crossshard.gradients.pipeline import check_gradient_dtype
from crossshard.optimizer import slots
from crossshard.optimizer.differentiate import (
    check_loss,
    differentiate,
    named_variables,
    trainable_variables,
)
from crossshard.optimizer.slots import Slots
from crossshard.optimizer.transformation import check_transformation
from crossshard.shards.axes import shards_of_gradient
from crossshard.shards.variables import (
    PER_SHARD,
    Holder,
    VariablesWanted,
    check_writable,
    current_trace,
    describe_variable,
    handed_in,
    is_in_step,
    is_per_shard,
    set_per_shard,
    set_shared,
)

GradientsAndVariables = Sequence[tuple[jax.Array | None, nnx.Variable]]


class Optimizer(optax.GradientTransformationExtraArgs, Holder):
    """An Optax transformation that can also be used as ``tf.compat.v1.train.Optimizer`` is.

    It is the transformation it wraps (``init``, ``update``), and beside that steps NNX variables
    in place, with slots of its own. It reduces nothing; ``CrossShardOptimizer`` does.

    Args:
      opt: an Optax transformation.
      name: a name to find its work by in profiles and HLO.

    Raises:
      ArgumentTypeError: ``opt`` is no Optax transformation; ``name`` is no string.
      ArgumentError: ``name`` is empty.

    >>> import jax.numpy as jnp, optax
    >>> from flax import nnx
    >>> w = nnx.Param(jnp.float32(2))
    >>> _ = Optimizer(optax.sgd(0.1)).minimize(lambda: w[...] ** 2, var_list=[w])
    >>> float(w[...])
    1.600000023841858
    """

    GATE_NONE = 0
    GATE_OP = 1
    GATE_GRAPH = 2

    _inner: optax.GradientTransformation
    _name: str
    # Each variable by the key of its slots; a copy may not have met its own yet.
    _variables: dict[str, nnx.Variable | None]
    _waiting: set[str]
    # What a variable would be called, by its id; it is kept with its name, so ids stay their own.
    _hints: dict[int, tuple[nnx.Variable, str]]
    # The keys that have slots, and the Optax state over them with a variable at every leaf.
    _built: set[str]
    _state: Any
    _made_in: Any

    def __init_subclass__(cls) -> None:
        # A tuple subclass would be taken apart by JAX and rebuilt from its two functions alone.
        jax.tree_util.register_static(cls)

    def __new__(cls, opt: optax.GradientTransformation, name: str = "Optimizer") -> Self:
        inner = check_transformation(opt)
        return cls._make_one(optax.with_extra_args_support(inner), inner, check_name(name))

    @classmethod
    def _make_one(
        cls,
        functions: optax.GradientTransformation,
        inner: optax.GradientTransformation,
        name: str,
    ) -> Self:
        self = super().__new__(cls, functions.init, functions.update)
        self._inner = inner
        self._name = name
        self._hints = {}
        self._made_in = current_trace()
        self.__setstate__({"variables": {}, "built": (), "state": None})
        return self

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    @property
    def inner(self) -> optax.GradientTransformation:
        """The wrapped transformation."""
        return self._inner

    def get_name(self) -> str:
        """The name given at construction."""
        return self._name

    def __repr__(self) -> str:
        return f"{type(self).__name__}({describe_rule(self._inner)}, name={self._name!r})"

    # Compute.

    def compute_gradients(
        self,
        loss: Callable[[], Any],
        var_list: Any = None,
        gate_gradients: int = GATE_OP,
        aggregation_method: int | None = None,
        colocate_gradients_with_ops: bool = False,
        grad_loss: Any = None,
    ) -> list[tuple[jax.Array | None, nnx.Variable]]:
        """The gradients of a loss with respect to variables, before any reduction.

        Args:
          loss: a function without arguments that returns a floating scalar.
          var_list: an NNX module, or a list of variables; every ``nnx.Param`` if ``None``.
          gate_gradients: 0, 1 or 2; no effect under XLA, which orders operations itself.
          aggregation_method: accepted as in TensorFlow; no effect under XLA.
          colocate_gradients_with_ops: accepted as in TensorFlow; no effect under XLA.
          grad_loss: a scalar that multiplies the gradients.

        Returns:
          ``(gradient, variable)`` pairs; the gradient is ``None`` where the loss does not reach
          the variable.

        Raises:
          ArgumentError, ArgumentTypeError: a loss that is no function or no scalar; no variables.
          VariableError: a variable that is not floating, or is given twice.
        """
        _check_gates(gate_gradients, aggregation_method, colocate_gradients_with_ops)
        return self._differentiate(loss, var_list, grad_loss)[1]

    def _differentiate(
        self, loss: Callable[[], Any], var_list: Any, grad_loss: Any
    ) -> tuple[jax.Array, list[tuple[jax.Array | None, nnx.Variable]]]:
        """This shard's loss, and the pairs that ``compute_gradients`` hands out."""
        return self._gradients_of(loss, var_list, grad_loss, 1)

    def _gradients_of(
        self, loss: Callable[[], Any], var_list: Any, grad_loss: Any, divisor: int
    ) -> tuple[jax.Array, list[tuple[jax.Array | None, nnx.Variable]]]:
        loss = check_loss(loss)
        found = named_variables(trainable_variables(loss) if var_list is None else var_list)
        self._hints.update(found)
        variables = [variable for variable, _ in found.values()]
        shards = shards_of_gradient(self._axis_name())
        value, gradients = differentiate(loss, variables, shards, divisor, grad_loss, var_list)
        return value, list(zip(gradients, variables, strict=True))

    def _axis_name(self) -> tuple[str, ...]:
        return ()

    # Apply.

    def apply_gradients(
        self,
        grads_and_vars: GradientsAndVariables,
        global_step: nnx.Variable | None = None,
        name: str | None = None,
        **extra_args: Any,
    ) -> None:
        """Step the variables.

        Args:
          grads_and_vars: ``(gradient, variable)`` pairs; pairs without a gradient are passed over.
          global_step: an integer variable that is incremented by 1 after the update.
          name: a name to find this step by in profiles and HLO; the optimizer's if ``None``.
          **extra_args: what the wrapped rule takes besides, such as ``value=loss``.

        Raises:
          ArgumentError, ArgumentTypeError: no pairs, no gradients, what is no pair.
          VariableError: a variable twice, of another shape than its gradient, or out of reach.
        """
        pairs = check_pairs(grads_and_vars)
        _check_global_step(global_step)
        if name is not None:
            check_name(name)
        given = [(gradient, variable) for gradient, variable in pairs if gradient is not None]
        variables = [variable for _, variable in given]
        for variable in [*variables, *([] if global_step is None else [global_step])]:
            check_writable(variable)
        for slot in self.variables():
            check_writable(slot)
        keys = self._keys_of(variables, [variable for _, variable in pairs])
        self._want_slots(keys, variables)

        state = self.state
        part = slots.restrict(state, keys)
        params = Slots(zip(keys, (v.get_value() for v in variables), strict=True))
        gradients = Slots(zip(keys, (jnp.asarray(g) for g, _ in given), strict=True))
        with jax.named_scope(name) if name else contextlib.nullcontext():
            updates, part = self.update(gradients, part, params, **extra_args)
            stepped = optax.apply_updates(params, updates)
        for key, variable in zip(keys, variables, strict=True):
            variable.set_value(stepped[key])
        self._write_state(slots.merge(state, part))
        if global_step is not None:
            global_step.set_value(global_step.get_value() + 1)

    def minimize(
        self,
        loss: Callable[[], Any],
        global_step: nnx.Variable | None = None,
        var_list: Any = None,
        gate_gradients: int = GATE_OP,
        aggregation_method: int | None = None,
        colocate_gradients_with_ops: bool = False,
        name: str | None = None,
        grad_loss: Any = None,
    ) -> jax.Array:
        """``compute_gradients`` and ``apply_gradients``; returns this shard's own loss, unscaled.

        The loss also goes to the wrapped rule, for those that take ``value=``. Arguments and
        errors are those of the two methods.
        """
        _check_gates(gate_gradients, aggregation_method, colocate_gradients_with_ops)
        value, pairs = self._differentiate(loss, var_list, grad_loss)
        extra_args = {"value": value} if _takes_value(self._inner) else {}
        self.apply_gradients(pairs, global_step, name, **extra_args)
        return value

    # Slots.

    def build(self, var_list: Any) -> None:
        """Make the slots of these variables now, rather than at the first step.

        Args:
          var_list: an NNX module, or a list of variables.

        Raises:
          ArgumentError, ArgumentTypeError, VariableError: as for ``compute_gradients``.
        """
        found = named_variables(var_list)
        self._hints.update(found)
        variables = [variable for variable, _ in found.values()]
        self._want_slots(self._keys_of(variables, variables), variables)

    def _keys_of(
        self, variables: Sequence[nnx.Variable], order: Sequence[nnx.Variable]
    ) -> list[str]:
        return [self._key_of(variable, order) for variable in variables]

    def _key_of(self, variable: nnx.Variable, order: Sequence[nnx.Variable]) -> str:
        known = self._known_key(variable)
        if known is not None:
            self._waiting.discard(known)
            return known
        place = next(i for i, other in enumerate(order) if other is variable)
        _, hint = self._hints.get(id(variable), (variable, str(place)))
        key, count = hint, 0
        while key in self._variables and key not in self._waiting:
            count += 1
            key = f"{hint}#{count}"
        self._waiting.discard(key)
        self._variables[key] = variable
        return key

    def _known_key(self, variable: Any) -> str | None:
        return next((key for key, known in self._variables.items() if known is variable), None)

    def _want_slots(self, keys: Sequence[str], variables: Sequence[nnx.Variable]) -> None:
        pairs = zip(keys, variables, strict=True)
        missing = {key: variable for key, variable in pairs if key not in self._built}
        if not missing:
            return
        handed = handed_in()
        if handed is not None:
            lasting = [variable in handed for variable in missing.values()]
            lasting.append(any(self is holder for holder in handed.holders))
            if all(lasting):
                raise VariablesWanted(lambda: self._make_slots(missing))
            if any(lasting):
                which = [describe_variable(v) for v in missing.values()]
                known = ["handed to it" if lasts else "made in it" for lasts in lasting]
                raise VariableError(
                    f"A step makes either both an optimizer and all of its variables, or neither: "
                    f"here {self!r} was {known[-1]}, and {which[0]} was {known[0]}. Pass both to "
                    f"it as arguments."
                )
        self._make_slots(missing)

    def _make_slots(self, missing: dict[str, nnx.Variable]) -> None:
        params = Slots({key: variable.get_value() for key, variable in missing.items()})
        sizes = {v.get_metadata(PER_SHARD) for v in missing.values() if is_per_shard(v)}
        if sizes:
            axes = Slots({key: 0 if is_per_shard(v) else None for key, v in missing.items()})
            made = jax.vmap(self._inner.init, in_axes=(axes,))(params)
        else:
            made = self._inner.init(params)
        if jax.tree.leaves(made) and current_trace() != self._made_in:
            raise VariableError(
                f"The slots of {self!r} would be made inside a jax.jit, nnx.jit or other trace, "
                f"and be lost when it ends. Run the step with crossshard.shard, which hands them "
                f"out, or use the Optax idiom: nnx.Optimizer(model, optimizer, wrt=nnx.Param)."
            )
        metadata = {PER_SHARD: sizes.pop()} if sizes else {}
        new = jax.tree.map(lambda x: nnx.OptState(jnp.asarray(x), **metadata), made)
        self._state = new if not self._built else slots.merge(self._state, new, keep_common=True)
        self._built |= missing.keys()

    def get_slot(self, var: nnx.Variable, name: str) -> Any:
        """The slot of a variable, as a variable; ``None`` if there is none of this name.

        Names are those of the fields of the Optax state (``mu``, ``nu``, ``trace``,
        ``sum_of_squares`` …) or TensorFlow's (``m``, ``v``, ``momentum``, ``accumulator`` …).
        """
        key = self._known_key(var)
        return None if key is None or key not in self._built else slots.find(self._state, key, name)

    def get_slot_names(self) -> list[str]:
        """The names of the slots, in Optax's words; empty before the first step."""
        return list(slots.by_name(self._state))

    def variables(self) -> list[nnx.Variable]:
        """Every variable of the state: slots and what belongs to all, such as a step count."""
        return list(jax.tree.leaves(self._state, is_leaf=_is_variable))

    def held_variables(self) -> list[nnx.Variable]:
        """What a runner hands in and out with the optimizer."""
        return self.variables()

    def known_variables(self) -> list[nnx.Variable | None]:
        """The variables that have been stepped, in the order in which they were met."""
        return list(self._variables.values())

    @property
    def state(self) -> Any:
        """The whole Optax state as a pytree of arrays, to save; ``None`` before there is one.

        Assign a pytree of the same structure to restore it, after ``build`` or a first step.
        """
        return jax.tree.map(lambda v: v.get_value(), self._state, is_leaf=_is_variable)

    @state.setter
    def state(self, state: Any) -> None:
        have = self.state
        if jax.tree.structure(have) != jax.tree.structure(state):
            made = "" if self._built else " It has none yet: call build(model) first."
            raise ArgumentError(
                f"The state must have the structure of this optimizer's own.{made} Expected "
                f"{jax.tree.structure(have)}; got {jax.tree.structure(state)}."
            )
        paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(have)[0]]
        variables, values = self.variables(), [jnp.asarray(x) for x in jax.tree.leaves(state)]
        known = [v for v in self._variables.values() if v is not None]
        sizes = {v.get_metadata(PER_SHARD) for v in known if is_per_shard(v)}
        lie = [
            _how_it_lies(path, variable, value, sizes)
            for path, variable, value in zip(paths, variables, values, strict=True)
        ]
        for write, variable, value in zip(lie, variables, values, strict=True):
            write(variable, value.astype(variable.get_raw_value().dtype))

    def _write_state(self, state: Any) -> None:
        for variable, value in zip(self.variables(), jax.tree.leaves(state), strict=True):
            if variable.get_raw_value() is not value:
                variable.set_raw_value(value)

    # Copies. A copy knows its variables by key until it meets them.

    def _construction(self) -> dict[str, Any]:
        return {"opt": self._inner, "name": self._name}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        new = type(self)(**self._construction())
        known = {key: memo.get(id(v), v) for key, v in self._variables.items()}
        new.__setstate__({"variables": known, "built": self._built, "state": self._state})
        # copy.deepcopy of an nnx.Variable gives its array.
        new._state = jax.tree.map(lambda v: v.copy(), self._state, is_leaf=_is_variable)
        memo[id(self)] = new
        return new

    def __copy__(self) -> Self:
        return self.__deepcopy__({})

    def __reduce__(self) -> Any:
        # Optax's rules are closures, which pickle refuses and cloudpickle takes.
        made = cloudpickle.dumps(self._construction())
        known = dict.fromkeys(self._variables)
        return (
            _rebuild,
            (type(self), made),
            {"variables": known, "built": self._built, "state": self._state},
        )

    def __setstate__(self, saved: dict[str, Any]) -> None:
        self._variables = dict(saved["variables"])
        self._waiting = set(saved["variables"])
        self._built = set(saved["built"])
        self._state = saved["state"]


jax.tree_util.register_static(Optimizer)


def _rebuild(cls: type[Optimizer], made: bytes) -> Optimizer:
    return cls(**cloudpickle.loads(made))


def _how_it_lies(
    path: Any, variable: nnx.Variable, value: jax.Array, sizes: set[int]
) -> Callable[[nnx.Variable, Any], None]:
    """How to write a saved value: what no shard has come to own is saved once for all."""
    shape = jnp.shape(variable.get_raw_value())
    shape = shape[1:] if is_per_shard(variable) and not is_in_step(variable) else shape
    if value.shape == shape:
        return set_shared
    if value.shape in [(size, *shape) for size in sizes]:
        return set_per_shard
    raise ArgumentError(
        f"The state's {jax.tree_util.keystr(path)} must have shape {shape}, or [shards, …] of that "
        f"where the variables differ between shards; got {value.shape}."
    )


def _takes_value(inner: optax.GradientTransformation) -> bool:
    kinds = {p.name: p.kind for p in inspect.signature(inner.update).parameters.values()}
    return "value" in kinds or inspect.Parameter.VAR_KEYWORD in kinds.values()


def _is_variable(leaf: Any) -> bool:
    return isinstance(leaf, nnx.Variable)


def describe_rule(inner: optax.GradientTransformation) -> str:
    """What to call a wrapped rule: its own repr, or the function that made it."""
    if isinstance(inner, Optimizer):
        return repr(inner)
    function = getattr(inner.update, "__qualname__", type(inner).__name__)
    return "optax " + function.split(".")[0]


def check_name(name: Any) -> str:
    """``name`` if it is a string that is not empty."""
    if not isinstance(name, str):
        raise ArgumentTypeError(f"name must be a string; got {name!r} ({type(name).__name__}).")
    if not name:
        raise ArgumentError("name must not be empty: it is how the optimizer is found in profiles.")
    return name


def check_pairs(grads_and_vars: Any) -> list[tuple[jax.Array | None, nnx.Variable]]:
    """The pairs as a list, each checked.

    Raises:
      ArgumentTypeError: not iterable; a gradient that is no floating array.
      ArgumentError: none at all, none with a gradient, or an item that is no pair.
      VariableError: no variable, one given twice, or one of another shape than its gradient.
    """
    if not isinstance(grads_and_vars, Iterable):
        raise ArgumentTypeError(
            f"grads_and_vars must be a list of (gradient, variable) pairs; got "
            f"{type(grads_and_vars).__name__}."
        )
    items = list(grads_and_vars)
    if not items:
        raise ArgumentError("No variables provided.")
    for item in items:
        _check_pair(item)
    seen: set[int] = set()
    for _, variable in items:
        if id(variable) in seen:
            raise VariableError(f"{describe_variable(variable)} is given twice.")
        seen.add(id(variable))
    if all(gradient is None for gradient, _ in items):
        raise ArgumentError(
            f"No gradients provided for any variable: "
            f"{[describe_variable(variable) for _, variable in items]}."
        )
    return [(gradient, variable) for gradient, variable in items]


def _check_pair(item: Any) -> None:
    if not isinstance(item, tuple | list) or len(item) != 2:
        raise ArgumentError(f"Each item must be a (gradient, variable) pair; got {item!r:.120}.")
    gradient, variable = item
    if not isinstance(variable, nnx.Variable):
        swapped = " Gradient and variable are swapped." if _is_variable(gradient) else ""
        raise VariableError(
            f"Each pair must end with an nnx variable; got {type(variable).__name__}.{swapped}"
        )
    if gradient is None:
        return
    name = f"The gradient of {describe_variable(variable)}"
    if _is_variable(gradient) or isinstance(gradient, str) or not _arraylike(gradient):
        raise ArgumentTypeError(f"{name} must be an array; got {type(gradient).__name__}.")
    check_gradient_dtype(name, gradient)
    if not jnp.issubdtype(jnp.result_type(gradient), jnp.floating):
        raise ArgumentTypeError(
            f"{name} has dtype {jnp.result_type(gradient)}, not a floating one."
        )
    # A runner's per-shard variable holds one shard's value inside the step and all outside of it.
    if jnp.shape(gradient) != jnp.shape(variable.get_raw_value()):
        raise VariableError(f"{name} has shape {jnp.shape(gradient)}.")


def _arraylike(gradient: Any) -> bool:
    return hasattr(gradient, "dtype") or isinstance(gradient, float)


def _check_global_step(global_step: Any) -> None:
    if global_step is None:
        return
    value = global_step.get_raw_value() if _is_variable(global_step) else None
    dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.integer) or shape != ():
        given = describe_variable(global_step) if _is_variable(global_step) else repr(global_step)
        raise ArgumentTypeError(
            f"global_step must be a scalar integer variable, because it is incremented in place; "
            f"got {given}. Write nnx.Variable(jnp.array(0))."
        )


def _check_gates(gate_gradients: Any, aggregation_method: Any, colocate: Any) -> None:
    whole = isinstance(gate_gradients, int) and not isinstance(gate_gradients, bool)
    if not whole or gate_gradients not in (0, 1, 2):
        raise ArgumentError(
            f"gate_gradients must be one of Optimizer.GATE_NONE (0), GATE_OP (1) and GATE_GRAPH "
            f"(2); got {gate_gradients!r}."
        )
    if aggregation_method is not None and not isinstance(aggregation_method, int):
        raise ArgumentTypeError(
            f"aggregation_method must be None or an int; got {aggregation_method!r}."
        )
    if not isinstance(colocate, bool):
        raise ArgumentTypeError(f"colocate_gradients_with_ops must be a bool; got {colocate!r}.")
