"""The meshes and weight updates that are worth a look."""

import dataclasses

from crossshard.errors import ArgumentError
from crossshard.pipeline.update.plan import WeightUpdate
from crossshard.tools.planning.topology import Topology
from crossshard.tools.planning.work import DATA, MODEL, Work

# A model is split over devices that are near: NVLink, or a part of a torus.
_MOST_OF_A_MODEL = 8


@dataclasses.dataclass(frozen=True)
class Choice:
    """A mesh and a weight update.

    Attributes:
      mesh: the sizes of its axes by their names.
      weight_update: ``"replicated"`` or ``"sharded"``.
    """

    mesh: dict[str, int]
    weight_update: str


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
    updates = [WeightUpdate.REPLICATED.value, WeightUpdate.SHARDED.value]
    if topology.size == 1:
        updates = updates[:1]
    return [Choice(mesh, update) for mesh in meshes for update in updates]
