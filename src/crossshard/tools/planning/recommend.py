"""plan: compile a step for a machine that is not there, in several ways, and choose one."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax

from crossshard._annotations import Loss, PyTree
from crossshard._text import size, time
from crossshard.model.models import partition
from crossshard.pipeline.update.plan import Rest
from crossshard.tools.planning.choices import choices
from crossshard.tools.planning.compile import candidates
from crossshard.tools.planning.report import Candidate, Plan
from crossshard.tools.planning.topology import Topology, topology
from crossshard.tools.planning.work import make_work

# Estimates that differ by less are taken for equal.
_ALIKE = 1.05


def plan(
    loss_fn: Callable[..., Loss],
    params: PyTree,
    batch: PyTree,
    optimizer: optax.GradientTransformation,
    *,
    topology: str,
    model_specs: PyTree = None,
    **options: PyTree,
) -> Plan:
    """Compile a training step for a pod or a cluster, in several ways, and say which to choose.

    Nothing is run there, and no array is allocated: a model of 70 billion parameters is a matter of
    shapes. The step is compiled with the weights updated on every shard, updated in parts, and
    resting in parts (``params="sharded"``), on a mesh of all devices and, with ``model_specs``, on
    those where 2, 4 or 8 of them share a model; not where the state alone is more than a device
    has. Times are estimates, from the published peaks of TPUs and GPUs; for CPUs there are none.

    Args:
      loss_fn: as ``make_train_step`` takes it.
      params: the model, as arrays or types, or a function without arguments that makes it, which is
        only traced.
      batch: the global batch, as arrays or types, or a function of the number of devices that
        returns it.
      optimizer: an Optax transformation.
      topology: ``"v5e:4x4"``, ``"v5p:16x16x16"``, ``"v6e:8x8"``: chips of a TPU slice;
        ``"h100:4x8"``, ``"a100:4x8"``, ``"h200:4x8"``, ``"b200:4x8"``: hosts times GPUs of a host;
        ``"cpu:8"``: CPU devices of this machine.
      model_specs: how the parameters may be split over a mesh axis ``"model"``: a pytree of
        ``PartitionSpec``, or a function of path and leaf that returns one.
      **options: further arguments of ``make_train_step``.

    Returns:
      A Plan: print it, read its attributes, or call ``to_json()``.

    Raises:
      ArgumentError: an unknown topology, a missing compiler, a step that cannot be compiled.

    >>> import jax, jax.numpy as jnp, optax
    >>> w, x = jax.ShapeDtypeStruct((8, 8), "float32"), jax.ShapeDtypeStruct((4, 8), "float32")
    >>> loss_fn = lambda w, x: jnp.mean((x @ w) ** 2)
    >>> plan(loss_fn, w, x, optax.adam(0.1), topology="cpu:1").candidates[0].fits
    True
    """
    work = make_work(loss_fn, params, batch, optimizer, model_specs, options)
    where = _topology(topology)
    found = candidates(work, where, choices(work, where))
    best, why = recommended(found)
    return Plan(
        topology=topology,
        devices=where.size,
        parameters=_number_of(work.params, options.get("wrt")),
        candidates=found,
        recommended=best,
        why=why,
        figures=_figures(where),
    )


_topology = topology


def _number_of(params: Any, wrt: Any) -> int:
    _, trained, frozen, *_ = partition(params, wrt)
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves((trained, frozen)))


def recommended(found: Sequence[Candidate]) -> tuple[int | None, str]:
    """The index of the candidate to choose, and why."""
    fitting = [place for place, each in enumerate(found) if each.fits]
    if not fitting:
        least = min(found, key=lambda each: each.memory.needed)
        return None, (
            f"None fits. {least.name} needs least, and {least.too_much} too much: take "
            f"more devices, a smaller batch, or split the model (model_specs)."
        )
    seconds = {place: _step(found[place]) for place in fitting}
    fastest = min(seconds.values())
    alike = [place for place in fitting if seconds[place] <= _ALIKE * fastest]
    # Whole parameters are simpler, and sent once.
    whole = [place for place in alike if found[place].params == Rest.REPLICATED]
    best = min(whole or alike, key=lambda place: found[place].memory.needed)
    chosen = found[best]
    others = [place for place in fitting if place != best]
    simpler = " with whole parameters" if whole and whole != alike else ""
    why = f"Recommended: {chosen.name}. "
    if not others:
        why += "It is the only one that fits" if len(found) > 1 else "It fits"
    elif math.isinf(fastest):
        why += f"It needs {size(chosen.memory.needed)}, the least of those that fit{simpler}"
    elif len(alike) > 1:
        why += (
            f"It needs {size(chosen.memory.needed)}, the least of those that are within "
            f"{_ALIKE - 1:.0%} of the fastest by the estimate{simpler}"
        )
    else:
        second = min(others, key=lambda place: seconds[place])
        why += (
            f"By the estimate a step takes {time(seconds[best])}, and one of the next, "
            f"{found[second].name}, {time(seconds[second])}"
        )
    return best, why + f". It leaves {size(chosen.memory.left)} of memory on each device."


def _step(each: Candidate) -> float:
    return math.inf if each.seconds is None else each.seconds.step


def _figures(where: Topology) -> str:
    chip = where.chip
    if chip is None:
        return "There are no estimates of time for CPUs."
    inside = f"{chip.inside / 1e9:g} GB/s inside a host"
    if chip.links > 1:
        inside = f"{chip.links} links of {chip.inside / 1e9:g} GB/s"
    peaks = ", ".join(f"{peak / 1e12:g} {dtype}" for dtype, peak in chip.flops.items())
    return (
        f"Times are estimates from published peaks, which programs do not reach: {peaks} TFLOP/s, "
        f"{chip.memory_bandwidth / 1e9:g} GB/s of memory, {inside}, {chip.across / 1e9:g} GB/s "
        f"across. Source: {chip.source}."
    )
