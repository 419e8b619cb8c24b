"""The stateful idiom: an Optax optimizer that updates NNX variables in place."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

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
from crossshard.optimizer.node import OptimizerNode, describe_optimizer
from crossshard.optimizer.provenance import Provenance
from crossshard.optimizer.transformation import check_transformation
from crossshard.pipeline.optimize import takes_value
from crossshard.shards.axes import shards_of_gradient
from crossshard.variables.binding import RetraceNeeded, bound, check_followed, check_writable
from crossshard.variables.describe import describe_variable
from crossshard.variables.discovery import (
    functions_behind,
    variables_behind,
)

GradientsAndVariables = Sequence[tuple[jax.Array | None, nnx.Variable]]


class Optimizer(OptimizerNode):
    """An Optax transformation with the API of ``tf.compat.v1.train.Optimizer``.

    It has the ``init`` and ``update`` of the inner optimizer, and also updates NNX variables in
    place, with slots. It does not reduce gradients; ``CrossShardOptimizer`` does.

    Args:
      opt: an Optax transformation.
      name: the name of its scope in profiles and HLO.

    Raises:
      ArgumentTypeError: ``opt`` is not an Optax transformation, or ``name`` is not a string.
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

    # The keywords that a subclass's apply_gradients takes itself.
    _own_keywords: tuple[str, ...] = ()

    _known_provenance: Provenance
    # What belongs to one optimizer, and not to its copies.
    _of_one_object = ("_known_provenance",)

    def __init__(self, opt: optax.GradientTransformation, name: str = "Optimizer"):
        inner = check_transformation(opt)
        self._construct(optax.with_extra_args_support(inner), inner, check_name(name))

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
          ``(gradient, variable)`` pairs; the gradient is ``None`` if the loss does not depend on
          the variable.

        Raises:
          ArgumentError, ArgumentTypeError: the loss is not a function or does not return a scalar,
            or there are no variables.
          VariableError: a variable that is not floating, or a duplicate.
        """
        check_gates(gate_gradients, aggregation_method, colocate_gradients_with_ops)
        return self._differentiate(loss, var_list, grad_loss)[1]

    def _differentiate(
        self, loss: Callable[[], Any], var_list: Any, grad_loss: Any
    ) -> tuple[jax.Array, list[tuple[jax.Array | None, nnx.Variable]]]:
        """This shard's loss, and the pairs that ``compute_gradients`` returns."""
        return self._gradients_of(loss, var_list, grad_loss)

    def _gradients_of(
        self,
        loss: Callable[[], Any],
        var_list: Any,
        grad_loss: Any,
        divisor: int = 1,
        loss_scale: jax.Array | None = None,
    ) -> tuple[jax.Array, list[tuple[jax.Array | None, nnx.Variable]]]:
        loss = check_loss(loss)
        var_list_or_all = trainable_variables(loss) if var_list is None else var_list
        found = named_variables(var_list_or_all, loss)
        self._provenance.names.update(found)
        variables = [variable for variable, _ in found.values()]
        shards = shards_of_gradient(self._axis_name())
        value, gradients = differentiate(
            loss, variables, shards, divisor, grad_loss, var_list, loss_scale, self._axis_name()
        )
        return value, list(zip(gradients, variables, strict=True))

    def _axis_name(self) -> tuple[str, ...]:
        return ()

    @property
    def _provenance(self) -> Provenance:
        """The gradients that ``compute_gradients`` returned in the current trace."""
        known = vars(self).get("_known_provenance")
        if known is None or not known.is_current():
            self._known_provenance = known = Provenance()
        return known

    def forget_trace(self) -> None:
        """Drop references to the variables of a trace that ends."""
        self.__dict__.pop("_known_provenance", None)

    # Apply.

    def apply_gradients(
        self,
        grads_and_vars: GradientsAndVariables,
        global_step: nnx.Variable | None = None,
        name: str | None = None,
        **extra_args: Any,
    ) -> None:
        """Update the variables.

        Args:
          grads_and_vars: ``(gradient, variable)`` pairs; those without a gradient are skipped.
          global_step: an integer variable that is incremented by 1 after the update, unless the
            update is skipped.
          name: the name of this step's scope in profiles and HLO; the optimizer's if ``None``.
          **extra_args: extra arguments of the inner optimizer, such as ``value=loss``.

        Raises:
          ArgumentError, ArgumentTypeError: no pairs, no gradients, or an item that is not a pair;
            an optimizer whose state cannot be slots; an unknown keyword.
          VariableError: a duplicate variable, one of another shape than its gradient, or one that
            was not passed to the step.
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
        self._create_missing_slots(keys, variables)

        names = {key: name for key, name in self._slots.names.items() if key in keys}
        stored = slots.restrict(self._slots.values(), keys)
        before = slots.as_seen(stored, names)
        seen = [names[key] for key in keys]
        params = dict(zip(seen, (v.get_value() for v in variables), strict=True))
        gradients = dict(zip(seen, (jnp.asarray(g) for g, _ in given), strict=True))
        try:
            with jax.named_scope(name) if name else contextlib.nullcontext():
                updates, after, skip = self._step(gradients, before, params, extra_args)
                stepped = optax.apply_updates(params, updates)
        except AttributeError as error:
            if type(error.obj) is dict:
                raise self._refusal(error) from error
            raise
        if jax.tree.structure(after) != jax.tree.structure(before):
            raise ArgumentError(
                f"The state of {describe_optimizer(self._inner)} changed its structure in a step, "
                f"from {jax.tree.structure(before)} to {jax.tree.structure(after)}. Slots are "
                f"created once and keep their structure; use the Optax idiom (init and update)."
            )
        for key, variable in zip(seen, variables, strict=True):
            variable.set_value(stepped[key])
        after = slots.as_stored(after, stored, names)
        self._slots.write(slots.merge(self._slots.values(), after))
        if global_step is not None:
            count = global_step.get_value()
            global_step.set_value(count + 1 if skip is None else jnp.where(skip, count, count + 1))

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
        **extra_args: Any,
    ) -> jax.Array:
        """``compute_gradients`` and ``apply_gradients``; returns this shard's loss, unscaled.

        The loss is also passed to inner optimizers that take ``value=``. For arguments and errors
        see the two methods.
        """
        check_gates(gate_gradients, aggregation_method, colocate_gradients_with_ops)
        value, pairs = self._differentiate(loss, var_list, grad_loss)
        # A loss that is not used would still be summed over the shards.
        used = any(may_take(function, "value") for function in functions_behind(self))
        own = {"value": value} if used and takes_value(self._inner) else {}
        self.apply_gradients(pairs, global_step, name, **{**own, **extra_args})
        return value

    # Slots.

    def build(self, var_list: Any) -> None:
        """Create the slots of these variables now instead of at the first step.

        Args:
          var_list: an NNX module, or a list of variables.

        Raises:
          ArgumentError: the inner optimizer's state cannot be slots.
          ArgumentTypeError, VariableError: see ``compute_gradients``.
        """
        found = named_variables(var_list)
        self._provenance.names.update(found)
        variables = [variable for variable, _ in found.values()]
        self._create_missing_slots(self._keys(variables, variables), variables)

    def _keys(self, variables: Sequence[nnx.Variable], order: Sequence[nnx.Variable]) -> list[str]:
        names = self._provenance.names
        new = [v for v in variables if id(v) not in names and not self._slots.knows(v)]
        names.update(names_in_reach(new))
        return self._slots.keys(variables, order, names)

    def _create_missing_slots(self, keys: Sequence[str], variables: Sequence[nnx.Variable]) -> None:
        keyed = dict(zip(keys, variables, strict=True))
        missing = self._slots.missing(keyed)
        self._slots.bind({key: v for key, v in keyed.items() if key not in missing})
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
                origin = ["passed to it" if lasts else "created in it" for lasts in lasting]
                raise VariableError(
                    f"An optimizer and its variables must be either both passed to a step or both "
                    f"created in it: {self!r} was {origin[-1]}, and {which[0]} was {origin[0]}. "
                    f"Pass both as arguments."
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
            self._slots.check_all_bound(missing)
            raise VariableError(
                f"The slots of {self!r} would be created inside a trace, of jax.jit, nnx.jit, "
                f"nnx.cond, nnx.scan or the like, and be lost when it ends. Create them before "
                f"it with optimizer.build(model), for example in the first line of a step under "
                f"crossshard.shard."
            )
        self._slots.add(missing, made)

    def _step(
        self, gradients: Any, state: Any, params: Any, extra_args: Any
    ) -> tuple[Any, Any, jax.Array | None]:
        """One shard's updates and next state, and whether the update is skipped, bool[]."""
        with seen_by_optimizer():
            return *self.update(gradients, state, params, **extra_args), None

    def _initial(self, params: Any) -> Any:
        """One shard's state before the first step."""
        return self._inner.init(params)

    def _refusal(self, error: Exception) -> ArgumentError:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return ArgumentError(
            f"{describe_optimizer(self._inner)} cannot update variables: here parameters are a "
            f"dict from name to array, such as 'dense/kernel', and it failed on that ({reason}). "
            f"Write masks and labels as functions of the parameters; optimizers with their own "
            f"parameter type, such as lookahead, need the Optax idiom (init and update)."
        )

    def get_slot(self, var: nnx.Variable | str, name: str) -> Any:
        """The slot of a variable, as a variable; ``None`` if there is no such slot.

        ``var`` is the variable, or its name in ``state``: its path in the module, as in
        ``get_slot("dense/kernel", "m")``.

        Names are those of the fields of the Optax state (``mu``, ``nu``, ``trace``,
        ``sum_of_squares`` …) or TensorFlow's (``m``, ``v``, ``momentum``, ``accumulator`` …).
        """
        return self._slots.find(var, name)

    def get_slot_names(self) -> list[str]:
        """The names of the slots, as Optax names them; empty before the first step."""
        return self._slots.slot_names()

    def variables(self) -> list[nnx.Variable]:
        """Every variable of the state: slots and shared ones, such as a step count."""
        return self._slots.all()

    def known_variables(self) -> list[nnx.Variable | None]:
        """The updated variables, in order of first use."""
        return self._slots.known_variables()

    def computes_with(self) -> tuple[Any, ...]:
        """The transformation, whose functions may close over variables."""
        return (self._functions.given,)

    @property
    def state(self) -> Any:
        """The Optax state as a pytree of arrays, to save; ``None`` before the first step.

        Assign a pytree of the same structure to restore it, after ``build`` or a first step.
        Writing to a dict in it writes to the optimizer, as in
        ``opt.state.inner_state.hyperparams["learning_rate"] = 0.01``.
        """
        return self._slots.written_through(self._may_differ)

    @state.setter
    def state(self, state: Any) -> None:
        self._slots.restore(state, self._may_differ)

    def _may_differ(self, path: Any) -> bool:
        """Whether the state at a path may differ between shards with equal parameters."""
        del path
        return False
