"""Plans as plain data, and as tables: what each choice needs, and what it sends."""

import dataclasses
import json
from collections.abc import Mapping, Sequence

from crossshard._text import count, size, table
from crossshard.pipeline.update.plan import Rest


@dataclasses.dataclass(frozen=True)
class MemoryUse:
    """Bytes on each device.

    Attributes:
      parameters: of the parameters, those that are not trained included.
      optimizer_state: of the optimizer's state.
      other: of the batch, the rest of the state, and the padding of all arguments.
      temporaries: what else the program needs while it runs: activations and gradients; ``None`` if
        the compiler refused the program before it counted them.
      gradients: of all gradients, of which the temporaries hold those that are needed at one time.
      needed: all of these at the fullest moment, by the compiler; at least this, if the step was
        not compiled.
      available: on a device.
    """

    parameters: int
    optimizer_state: int
    other: int
    temporaries: int | None
    gradients: int
    needed: int
    available: int

    @property
    def left(self) -> int:
        """What is left; negative if it does not fit."""
        return self.available - self.needed


@dataclasses.dataclass(frozen=True)
class LinkUse:
    """What a step sends, on each device.

    Attributes:
      collectives: how many of each kind run.
      sent: the bytes in all.
      by_link: the bytes over each kind of link: ``"inside a host"``, ``"inside a slice"`` (between
        the hosts of a TPU slice), ``"across"`` (between hosts of GPUs).
      hidden: the bytes that are sent while matrix products or other kernels are scheduled.
    """

    collectives: Mapping[str, int]
    sent: float
    by_link: Mapping[str, float]
    hidden: float


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A mesh, and where parameters and optimizer state rest, compiled.

    Attributes:
      mesh: the sizes of its axes by their names.
      weight_update: ``"replicated"`` or ``"sharded"``.
      params: ``"replicated"``, or ``"sharded"`` if the parameters rest in parts.
      memory: on each device.
      links: what is sent; ``None`` if it was not compiled, or the compiler refused it.
      compiled: whether it was compiled, which it is not if its state alone is too large.
    """

    mesh: Mapping[str, int]
    weight_update: str
    params: str
    memory: MemoryUse
    links: LinkUse | None
    compiled: bool

    @property
    def fits(self) -> bool:
        """Whether it fits into the memory of a device."""
        return self.memory.left >= 0

    @property
    def name(self) -> str:
        """``data 4 x model 2, sharded``; ``in parts`` if the parameters are."""
        return name_of(self.mesh, self.weight_update, self.params)


def name_of(mesh: Mapping[str, int], weight_update: str, params: str) -> str:
    """The name of a candidate, such as ``data 4 x model 2, sharded``."""
    axes = " x ".join(f"{name} {size}" for name, size in mesh.items())
    return f"{axes}, {weight_update if params == Rest.REPLICATED else 'in parts'}"


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a step needs on a machine, for each mesh and way for its parameters to rest.

    Attributes:
      topology: its name.
      devices: how many there are.
      parameters: the number of parameters.
      candidates: those that were compiled, or are too large to be.

    >>> import jax, jax.numpy as jnp, optax
    >>> import crossshard
    >>> w, x = jax.ShapeDtypeStruct((8, 8), "float32"), jax.ShapeDtypeStruct((4, 8), "float32")
    >>> loss_fn = lambda w, x: jnp.mean((x @ w) ** 2)
    >>> found = crossshard.plan(loss_fn, w, x, optax.sgd(0.1), topology="cpu:1")
    >>> found.candidates[0].memory.parameters
    256
    """

    topology: str
    devices: int
    parameters: int
    candidates: Sequence[Candidate]

    def to_json(self, indent: int | None = None) -> str:
        """The plan as JSON.

        The keys are the attributes of this class and of its fields, and ``fits`` and ``left``.
        """
        fields = dataclasses.asdict(self)
        for each, candidate in zip(fields["candidates"], self.candidates, strict=True):
            each["fits"] = candidate.fits
            each["memory"]["left"] = candidate.memory.left
        return json.dumps(fields, indent=indent)

    def __str__(self) -> str:
        return self.table()

    def table(self) -> str:
        """Plain text tables of memory and of what is sent, a row for each candidate."""
        parts = [
            f"{self.parameters:,} parameters on {self.topology}, {count(self.devices, 'device')}",
            table(_MEMORY, [_memory_row(each) for each in self.candidates]),
            table(_LINKS, [_link_row(each) for each in self.candidates]),
        ]
        if names := "; ".join(each.name for each in self.candidates if not each.compiled):
            parts.append(
                f"Not compiled, since what rests on a device is more than its memory: {names}."
            )
        return "\n\n".join(parts)


_MEMORY = (
    *("memory per device", "fits", "parameters", "optimizer state", "other"),
    *("temporaries", "(gradients)", "needed", "available"),
)
_LINKS = (
    *("sent per device and step", "collectives", "inside a host", "inside a slice", "across"),
    *("all", "hidden"),
)


def _memory_row(each: Candidate) -> tuple[str, ...]:
    use = each.memory
    at_least = "" if each.compiled else "at least "
    fits = (
        f"yes, {size(use.left)} left" if each.fits else f"no, {at_least}{size(-use.left)} too much"
    )
    temporaries = "?" if use.temporaries is None else size(use.temporaries)
    return (
        *(each.name, fits, size(use.parameters), size(use.optimizer_state), size(use.other)),
        *(temporaries, f"({size(use.gradients)})", size(use.needed), size(use.available)),
    )


def _link_row(each: Candidate) -> tuple[str, ...]:
    if each.links is None:
        return (each.name, *["?"] * 6)
    kinds = ", ".join(f"{number} {kind}" for kind, number in each.links.collectives.items())
    places = (each.links.by_link.get(name, 0) for name in _LINKS[2:5])
    share = each.links.hidden / each.links.sent if each.links.sent else 0
    shown = [size(number) if number else "–" for number in (*places, each.links.sent)]
    return (each.name, kinds or "none", *shown, f"{share:.0%}")
