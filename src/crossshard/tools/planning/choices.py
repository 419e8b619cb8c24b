"""The meshes, and the ways for parameters and state to rest, that are worth a look."""

import dataclasses

from crossshard.errors import ArgumentError
from crossshard.pipeline.update.plan import Rest, WeightUpdate
from crossshard.tools.planning.topology import Topology
from crossshard.tools.planning.work import DATA, MODEL, Work

# A model is split over devices that are near: NVLink, or a part of a torus.
_MOST_OF_A_MODEL = 8


@dataclasses.dataclass(frozen=True)
class Choice:
    """A mesh, and where parameters and optimizer state rest.

    Attributes:
      mesh: the sizes of its axes by their names.
      weight_update: ``"replicated"`` or ``"sharded"``.
      params: ``"replicated"`` or ``"sharded"``.
    """

    mesh: dict[str, int]
    weight_update: str
    params: str

    @property
    def name(self) -> str:
        """``data 4 x model 2, sharded``; ``in parts`` if the parameters are."""
        axes = " x ".join(f"{name} {size}" for name, size in self.mesh.items())
        return f"{axes}, {self.weight_update if self.params == Rest.REPLICATED else 'in parts'}"


def choices(work: Work, topology: Topology) -> list[Choice]:
    """The choices for a step: each device is a shard, or 2, 4 … of them share a model.

    Raises:
      ArgumentError: the model cannot be split as model_specs say over any number of devices.
    """
    meshes = [{DATA: topology.size}]
    if work.model_specs is not None:
        problem = None
        size = 2
        while size <= min(_MOST_OF_A_MODEL, topology.size) and topology.size % size == 0:
            shape = {DATA: topology.size // size, MODEL: size}
            try:
                work.types_on(topology.mesh(shape))
                meshes.append(shape)
            except ArgumentError as error:
                problem = problem or error
            size *= 2
        if problem is not None and len(meshes) == 1:
            raise problem
    rests = [
        (WeightUpdate.REPLICATED.value, Rest.REPLICATED.value),
        (WeightUpdate.SHARDED.value, Rest.REPLICATED.value),
        (WeightUpdate.SHARDED.value, Rest.SHARDED.value),
    ]
    # Groups differ in their parameters, which cannot rest in parts; one shard has nothing to split.
    several = rests[:2] if work.is_grouped else rests
    of_mesh = lambda mesh: rests[:1] if mesh[DATA] == 1 else several
    return [Choice(mesh, *rest) for mesh in meshes for rest in of_mesh(mesh)]
