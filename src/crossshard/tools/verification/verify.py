"""``verify``: runs a step on 1 and on N shards, and says what differs."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from crossshard import TrainStep, _check, _mesh
from crossshard._annotations import Groups, Key, PyTree
from crossshard._hash import checksum
from crossshard.distributed.agreement import check_agreement, exchange
from crossshard.errors import ArgumentError, ArgumentTypeError
from crossshard.shards.axes import check_group_assignment, check_num_shards
from crossshard.shards.batch_axes import axes_of, check_batch_axis
from crossshard.step.rebuild import (
    axes_of_batch,
    groups_of,
    loss_over_rows_of,
    of_few_bits,
    on_part_of_mesh,
    own_rows,
    with_sgd,
)
from crossshard.tools.verification.conclude import Fault, Verification, conclude
from crossshard.tools.verification.measurement import Measurement
from crossshard.tools.verification.runs import map_arrays

# Steps of a random one, with other keys each, of which the mean is compared.
_SAMPLES = 64


def verify(
    step: Callable[[optax.GradientTransformation, int], Sequence[PyTree]] | TrainStep,
    *batch: PyTree,
    num_shards: int | None = None,
    key: Key | None = None,
    groups: Groups | None = None,
    batch_axis: PyTree = 0,
) -> Verification:
    """Run a training step on 1 and on N shards with plain SGD, and say what differs.

    The update on N shards is compared, for each parameter, with that of one device on the whole
    batch. The two should be equal; if they are not, it says where, and by which factor.

    Args:
      step: ``make_step(optimizer, num_shards) -> (step, *state)``: your code that builds the step
        and its first state, with this optimizer in the place of your own, for so many devices. The
        step is called ``step(*state, *batch)`` and returns the next state first, and then what it
        likes; NNX modules and optimizers may be changed in place. It splits the batch itself. Or a
        ``TrainStep``, which is built again with SGD; the batch is then ``params, batch``. If there
        are several processes, all of them make this call with a ``TrainStep`` and all rows.
      *batch: the arguments after the state. Shard ``i`` of N should get the ``i``-th of N equal
        parts of their rows.
      num_shards: N; all devices if ``None``.
      key: a random key, typed or raw, which is passed to the step as the last argument, if it takes
        one. Keys that it has from elsewhere need no word. If the shards draw other numbers than one
        device, the means of 64 steps are compared, and a note says how exactly.
      groups: the shards that reduce together, if they are not all.
      batch_axis: the axis of the rows in all arrays; or a list with one entry for each of
        ``*batch``: an axis, ``None`` if it has no rows, or a pytree prefix of it with these. A
        ``TrainStep`` has its own.

    Returns:
      The faults, a comparison for each parameter, and the words: print it.

    Raises:
      ArgumentError: the step cannot be run as described, or N shards with these rows; the
        processes of a job pass different rows.
      ArgumentTypeError: ``make_step`` does not return a step with its state.

    >>> import jax, jax.numpy as jnp, optax
    >>> def make_step(optimizer, num_shards):
    ...     def step(w, state, x):
    ...         gradient = num_shards * jax.grad(lambda w: jnp.mean((x @ w - 1) ** 2))(w)
    ...         updates, state = optimizer.update(gradient, state, w)
    ...         return optax.apply_updates(w, updates), state
    ...
    ...     w = jnp.zeros(3)
    ...     return step, w, optimizer.init(w)
    >>> x = jax.random.normal(jax.random.key(0), (16, 3))
    >>> print(verify(make_step, x, num_shards=8))
    wrong on 8 shards and 16 rows:
      0: 8.000 = N times the update of one device
    """
    # The step is run on one device, too, which no mesh of several can be set for.
    with _mesh.without_mesh():
        return _verify(step, batch, num_shards, key, groups, batch_axis)


def _verify(
    step: Callable[..., Any] | TrainStep,
    batch: Any,
    num_shards: Any,
    key: Any,
    groups: Any,
    batch_axis: Any,
) -> Verification:
    if isinstance(step, TrainStep):
        # It splits the batch by itself.
        if type(batch_axis) is not int or batch_axis != 0:
            raise ArgumentError(
                f"A TrainStep has its own batch_axis; leave batch_axis={_check.shown(batch_axis)} "
                f"out."
            )
        measurement = _of_train_step(step, batch, num_shards, key, groups)
        found = _found(measurement, lambda found: _with_those_of_others(found, step.mesh))
        params, *model_state, rows = batch
        of_loss = loss_over_rows_of(step, params, own_rows(step, rows), *model_state)
        few = "it was verified in float32: it sends {}, which no single step is exact in"
        sent = of_few_bits(step)
        beside = (of_loss, few.format(sent) if sent else "")
        return dataclasses.replace(found, notes=(*found.notes, *filter(None, beside)))
    if not callable(step):
        raise ArgumentTypeError(
            "verify takes make_step, a function of (optimizer, num_shards), or a TrainStep; got "
            f"{type(step).__name__}."
        )
    if jax.process_count() > 1:
        raise ArgumentError(
            f"In a job of {jax.process_count()} processes, verify takes a TrainStep, such as "
            "crossshard.make_train_step returns. Verify make_step in one process, with virtual "
            "devices."
        )
    number = len(jax.devices()) if num_shards is None else check_num_shards(num_shards)
    axes = [check_batch_axis(batch_axis)] * len(batch)
    if isinstance(batch_axis, list | tuple):
        axes = list(map(axes_of, batch_axis))
    if len(axes) != len(batch):
        raise ArgumentError(
            f"batch_axis has {len(axes)} entries for {len(batch)} inputs; pass one per input."
        )
    measurement = Measurement(step, batch, axes, key, _check_groups(groups, number))
    return _found(measurement, lambda found: found)


def _found(
    measurement: Measurement, agreed: Callable[[Verification], Verification]
) -> Verification:
    """What differs; of a random step, what its mean differs in."""
    found = agreed(conclude(measurement))
    if found.ok or not measurement.is_random():
        return found
    measurement.take_samples(_SAMPLES)
    return agreed(conclude(measurement))


def _check_groups(groups: Any, number: int) -> tuple[tuple[int, ...], ...]:
    checked = check_group_assignment(groups)
    if checked is None:
        return (tuple(range(number)),)
    checked.check_covers(number)
    return checked.groups


def _of_train_step(
    step: TrainStep, given: Sequence[Any], num_shards: Any, key: Any, groups: Any
) -> Measurement:
    if num_shards is not None or groups is not None:
        raise ArgumentError(
            "A TrainStep has its own number of shards and groups; leave num_shards and groups out."
        )
    if len(given) not in (2, 3):
        raise ArgumentTypeError(
            "verify(train_step, params, batch), or (train_step, params, model_state, batch), as "
            f"the loss takes them; got {len(given)} arguments after the step."
        )
    params, *model_state, batch = given
    check_agreement(
        "verify",
        lambda: {"batch": checksum(batch)},
        step.mesh,
        "Pass all rows in every process; each takes those of its own shards.",
    )
    shards, factor = groups_of(step)

    def make(optimizer: Any, number: int) -> Any:
        alone = number == 1
        built = with_sgd(step, optimizer, alone=alone)
        arrays = (params, *model_state)
        if alone:
            arrays = map_arrays(lambda x: on_part_of_mesh(x, built.mesh), arrays)
        state = built.init(arrays[0], 0 if key is None else key, model_state=(*arrays[1:], None)[0])
        take = lambda state, batch: built(state, own_rows(built, batch))
        return built if alone else take, state

    return Measurement(make, (batch,), (axes_of_batch(step),), None, shards, factor)


def _with_those_of_others(found: Verification, mesh: Mesh) -> Verification:
    """With the faults that other processes found, since each looks at its own devices."""
    own = json.dumps([dataclasses.asdict(fault) for fault in found.faults])
    of_each = [list(map(_fault, json.loads(told))) for told in exchange("verify", own, mesh)]
    everywhere = [fault for fault in of_each[0] if all(fault in faults for faults in of_each)]
    others = [
        dataclasses.replace(fault, sentence=f"{fault.sentence} (found in process {process})")
        for process, faults in enumerate(of_each)
        for fault in faults
        if fault not in everywhere
    ]
    return dataclasses.replace(found, faults=(*everywhere, *others))


def _fault(told: dict[str, Any]) -> Fault:
    return Fault(**told | {name: tuple(told[name]) for name in ("leaves", "shards")})
