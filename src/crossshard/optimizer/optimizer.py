"""The stateful idiom: an Optax transformation as an object that steps NNX variables in place."""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import cloudpickle
import jax
import jax.numpy as jnp
import optax
from flax import nnx

from crossshard import _flax, _jax
from crossshard.errors import ArgumentError, CrossshardError, VariableError
from crossshard.optimizer import slots
from crossshard.optimizer.arguments import (
    check_gates,
    check_global_step,
    check_keywords,
    check_name,
    check_pairs,
    may_take,
)
from crossshard.optimizer.differentiate import (
    check_loss,
    differentiate,
    trainable_variables,
)
from crossshard.optimizer.names import named_variables, names_in_reach, seen_by_optimizer
from crossshard.optimizer.provenance import Provenance
from crossshard.optimizer.slot_variables import SlotVariables
from crossshard.optimizer.transformation import check_transformation
from crossshard.pipeline.optimize import takes_value
from crossshard.shards.axes import shards_of_gradient
from crossshard.variables.binding import RetraceNeeded, bound, check_followed, check_writable
from crossshard.variables.describe import describe_variable
from crossshard.variables.discovery import (
    VariableContainer,
    functions_behind,
    variables_behind,
)

GradientsAndVariables = Sequence[tuple[jax.Array | None, nnx.Variable]]


class Optimizer(optax.GradientTransformationExtraArgs, VariableContainer):
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

    # What apply_gradients takes for itself of the keywords that it hands on.
    _own_keywords: tuple[str, ...] = ()

    _inner: optax.GradientTransformation
    _name: str
    _slots: SlotVariables
    _handed_out: Provenance
    # The trace in which it was made; None if NNX or JAX rebuilt it from its parts.
    _made_in: Any

    def __init_subclass__(cls) -> None:
        _register(cls)

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        # A subclass may take other arguments and call __init__ with ours, so the two functions of
        # the tuple are made before it is known what they do.
        del args, kwargs
        functions = _Functions()
        self = super().__new__(cls, functions.init, functions.update)
        self._functions = functions
        return self

    def __init__(self, opt: optax.GradientTransformation, name: str = "Optimizer"):
        inner = check_transformation(opt)
        self._construct(optax.with_extra_args_support(inner), inner, name)

    def _construct(self, functions: Any, inner: optax.GradientTransformation, name: str) -> None:
        """Take up what ``init`` and ``update`` do, and what they wrap."""
        self._name = check_name(name)
        self._inner = inner
        self._functions.become(functions, Optimizer.__repr__(self))
        self._slots = SlotVariables()
        self._made_in = _flax.current_trace()

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
        return f"{type(self).__name__}({describe_optimizer(self._inner)}, name={self._name!r})"

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
        check_gates(gate_gradients, aggregation_method, colocate_gradients_with_ops)
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
        var_list_or_all = trainable_variables(loss) if var_list is None else var_list
        found = named_variables(var_list_or_all, loss)
        self._provenance.names.update(found)
        variables = [variable for variable, _ in found.values()]
        shards = shards_of_gradient(self._axis_name())
        value, gradients = differentiate(loss, variables, shards, divisor, grad_loss, var_list)
        return value, list(zip(gradients, variables, strict=True))

    def _axis_name(self) -> tuple[str, ...]:
        return ()

    @property
    def _provenance(self) -> Provenance:
        """What ``compute_gradients`` handed out in the trace in force."""
        known = vars(self).get("_handed_out")
        if known is None or not known.is_current():
            self._handed_out = known = Provenance()
        return known

    def forget_trace(self) -> None:
        """Let go of the variables whose gradients were handed out in a trace that ends."""
        self.__dict__.pop("_handed_out", None)

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
          **extra_args: what the wrapped optimizer takes besides, such as ``value=loss``.

        Raises:
          ArgumentError, ArgumentTypeError: no pairs, no gradients, what is no pair; an optimizer
            that cannot have variables for slots; a keyword that nothing takes.
          VariableError: a variable twice, of another shape than its gradient, or out of reach.
        """
        pairs = check_pairs(grads_and_vars)
        check_global_step(global_step)
        if name is not None:
            check_name(name)
        others = [keyword for keyword in extra_args if keyword not in self._own_keywords]
        if others:
            check_keywords(others, self._own_keywords, functions_behind(self))
        given = [(gradient, variable) for gradient, variable in pairs if gradient is not None]
        variables = [variable for _, variable in given]
        for variable in [*variables, *([] if global_step is None else [global_step])]:
            check_writable(variable)
        for slot in self.variables():
            check_writable(slot)
        for read in [] if _jax.at_top_level() else variables_behind(self):
            check_followed(read)
        keys = self._keys(variables, [variable for _, variable in pairs])
        self._want_slots(keys, variables)

        names = {key: name for key, name in self._slots.names.items() if key in keys}
        stored = slots.restrict(self._slots.values(), keys)
        before = slots.as_seen(stored, names)
        seen = [names[key] for key in keys]
        params = dict(zip(seen, (v.get_value() for v in variables), strict=True))
        gradients = dict(zip(seen, (jnp.asarray(g) for g, _ in given), strict=True))
        try:
            with jax.named_scope(name) if name else contextlib.nullcontext():
                updates, after = self._step(gradients, before, params, extra_args)
                stepped = optax.apply_updates(params, updates)
        except AttributeError as error:
            if type(error.obj) is dict:
                raise self._refusal(error) from error
            raise
        if jax.tree.structure(after) != jax.tree.structure(before):
            raise ArgumentError(
                f"The state of {describe_optimizer(self._inner)} changed its structure in a step, "
                f"from {jax.tree.structure(before)} to {jax.tree.structure(after)}. Slots are "
                f"variables that are made once; use the Optax idiom (init and update)."
            )
        for key, variable in zip(seen, variables, strict=True):
            variable.set_value(stepped[key])
        after = slots.as_stored(after, stored, names)
        self._slots.write(slots.merge(self._slots.values(), after))
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
        check_gates(gate_gradients, aggregation_method, colocate_gradients_with_ops)
        value, pairs = self._differentiate(loss, var_list, grad_loss)
        # A loss that nothing takes would still be summed over the shards.
        asks = any(may_take(function, "value") for function in functions_behind(self))
        extra_args = {"value": value} if asks and takes_value(self._inner) else {}
        self.apply_gradients(pairs, global_step, name, **extra_args)
        return value

    # Slots.

    def build(self, var_list: Any) -> None:
        """Make the slots of these variables now, rather than at the first step.

        Args:
          var_list: an NNX module, or a list of variables.

        Raises:
          ArgumentError: the wrapped rule cannot make slots for variables.
          ArgumentTypeError, VariableError: as for ``compute_gradients``.
        """
        found = named_variables(var_list)
        self._provenance.names.update(found)
        variables = [variable for variable, _ in found.values()]
        self._want_slots(self._keys(variables, variables), variables)

    def _keys(self, variables: Sequence[nnx.Variable], order: Sequence[nnx.Variable]) -> list[str]:
        names = self._provenance.names
        met = [v for v in variables if id(v) not in names and not self._slots.knows(v)]
        names.update(names_in_reach(met))
        return self._slots.keys(variables, order, names)

    def _want_slots(self, keys: Sequence[str], variables: Sequence[nnx.Variable]) -> None:
        keyed = dict(zip(keys, variables, strict=True))
        missing = self._slots.missing(keyed)
        self._slots.meet({key: v for key, v in keyed.items() if key not in missing})
        if not missing:
            return
        around = bound()
        if around is not None:
            lasting = [variable in around for variable in missing.values()]
            lasting.append(any(self is container for container in around.containers))
            if all(lasting):
                raise RetraceNeeded(lambda: self._make_slots(missing))
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
        try:
            with seen_by_optimizer():
                made = self._slots.initial(self._initial, missing)
        except CrossshardError:
            raise
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise self._refusal(error) from error
        lasts = (
            _jax.at_top_level() if self._made_in is None else _flax.current_trace() == self._made_in
        )
        if jax.tree.leaves(made) and not lasts:
            self._slots.check_all_met(missing)
            raise VariableError(
                f"The slots of {self!r} would be made inside a trace, of jax.jit, nnx.jit, "
                f"nnx.cond, nnx.scan or the like, and be lost when it ends. Make them before it, "
                f"with optimizer.build(model); the first line of a step under crossshard.shard "
                f"is a place for that."
            )
        self._slots.add(missing, made)

    def _step(self, gradients: Any, state: Any, params: Any, extra_args: Any) -> tuple[Any, Any]:
        """The updates, and the next state as one shard has it."""
        with seen_by_optimizer():
            return self.update(gradients, state, params, **extra_args)

    def _initial(self, params: Any) -> Any:
        """The state over parameters, as one shard has it."""
        return self._inner.init(params)

    def _refusal(self, error: Exception) -> ArgumentError:
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        return ArgumentError(
            f"{describe_optimizer(self._inner)} cannot step variables: here parameters are a dict "
            f"from name to array, such as 'dense/kernel', and on that it failed ({said}). Give "
            f"masks and labels as functions of the parameters; an optimizer that wants parameters "
            f"of a form of its own, such as lookahead, takes the Optax idiom (init and update)."
        )

    def get_slot(self, var: nnx.Variable | str, name: str) -> Any:
        """The slot of a variable, as a variable; ``None`` if there is none of this name.

        The variable is given itself, or by the name that ``state`` has for it: its path in the
        module, as in ``get_slot("dense/kernel", "m")``.

        Names are those of the fields of the Optax state (``mu``, ``nu``, ``trace``,
        ``sum_of_squares`` …) or TensorFlow's (``m``, ``v``, ``momentum``, ``accumulator`` …).
        """
        return self._slots.find(var, name)

    def get_slot_names(self) -> list[str]:
        """The names of the slots, in Optax's words; empty before the first step."""
        return self._slots.slot_names()

    def variables(self) -> list[nnx.Variable]:
        """Every variable of the state: slots and what belongs to all, such as a step count."""
        return self._slots.all()

    def known_variables(self) -> list[nnx.Variable | None]:
        """The variables that have been stepped, in the order in which they were met."""
        return self._slots.known_variables()

    def computes_with(self) -> tuple[Any, ...]:
        """What does the work, which may close over variables."""
        return (self._functions.given,)

    @property
    def state(self) -> Any:
        """The whole Optax state as a pytree of arrays, to save; ``None`` before there is one.

        Assign a pytree of the same structure to restore it, after ``build`` or a first step. What
        is written to a dict in it is written to the optimizer, as in
        ``opt.state.inner_state.hyperparams["learning_rate"] = 0.01``.
        """
        return self._slots.written_through(self._may_differ)

    @state.setter
    def state(self, state: Any) -> None:
        self._slots.restore(state, self._may_differ)

    def _may_differ(self, path: Any) -> bool:
        """Whether the state at a path may differ between shards whose parameters do not."""
        del path
        return False

    # Copies, and what JAX and NNX rebuild. Each knows its variables by key until it meets them.

    def _attributes(self) -> dict[str, Any]:
        own = ("_slots", "_made_in", "_functions", "_handed_out")
        return {name: value for name, value in vars(self).items() if name not in own}

    @classmethod
    def _rebuilt(cls, functions: Any, attributes: Mapping[str, Any], slots: SlotVariables) -> Self:
        new = cls.__new__(cls)
        new.__dict__.update(attributes)
        new._functions.become(functions, Optimizer.__repr__(new))
        new._slots = slots
        new._made_in = None
        return new

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        new = self._rebuilt(self._functions.given, self._attributes(), self._slots.copied(memo))
        memo[id(self)] = new
        return new

    def __copy__(self) -> Self:
        return self.__deepcopy__({})

    def __reduce__(self) -> Any:
        # Optax's transformations are closures, which pickle refuses and cloudpickle takes.
        made = cloudpickle.dumps((self._functions.given, self._attributes()))
        return _unpickled, (type(self), made, self._slots)


class _Functions:
    """The functions of an optimizer, which become what its ``__init__`` says they are."""

    given: Any = None
    text = "Optimizer"

    def become(self, given: Any, text: str) -> None:
        self.given = given
        self.text = text

    def __repr__(self) -> str:
        # NNX prints an optimizer, which is a tuple, as its two functions.
        return self.text

    def init(self, params: Any) -> Any:
        return self.given.init(params)

    def update(self, updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
        return self.given.update(updates, state, params, **extra_args)


@dataclasses.dataclass(frozen=True, repr=False)
class _Static:
    """All of an optimizer but its slot variables; equal for an optimizer and its rebuilt copies."""

    functions: Any
    attributes: Mapping[str, Any] = dataclasses.field(compare=False)
    keys: tuple[str, ...]
    built: frozenset[str]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Static) or self.functions is not other.functions:
            return False
        return (self.keys, self.built) == (other.keys, other.built)

    def __hash__(self) -> int:
        return hash((id(self.functions), self.keys, self.built))

    def __repr__(self) -> str:
        return f"slots of {', '.join(self.keys) or 'nothing'}"


def _flatten(optimizer: Optimizer) -> tuple[Any, _Static]:
    slots = optimizer._slots
    static = _Static(
        optimizer._functions.given, optimizer._attributes(), slots.known_keys(), slots.built
    )
    return ((jax.tree_util.GetAttrKey("state"), slots.tree),), static


def _register(cls: type[Optimizer]) -> None:
    """Make a class of optimizers a node of JAX's trees and of NNX's graphs.

    Its children are its slot variables, so that NNX finds, splits, traces and saves them as it does
    those of ``nnx.Optimizer``.
    """

    def unflatten(static: _Static, children: Any) -> Optimizer:
        slots = SlotVariables(dict.fromkeys(static.keys), static.built, *children)
        return cls._rebuilt(static.functions, static.attributes, slots)

    jax.tree_util.register_pytree_with_keys(cls, _flatten, unflatten)
    nnx.register_data_type(cls)


_register(Optimizer)


def _unpickled(cls: type[Optimizer], made: bytes, slots: SlotVariables) -> Optimizer:
    functions, attributes = cloudpickle.loads(made)
    return cls._rebuilt(functions, attributes, slots)


def describe_optimizer(inner: optax.GradientTransformation) -> str:
    """What to call a wrapped optimizer: its own repr, or the function that made it."""
    if isinstance(inner, Optimizer):
        return repr(inner)
    function = getattr(inner.update, "__qualname__", type(inner).__name__)
    return "optax " + function.split(".")[0]
