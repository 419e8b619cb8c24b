"""Together: what the processes of a job agree on, so that none waits for one that has failed."""

import hashlib
import json
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from crossshard.checkpoints.manifest import Damaged
from crossshard.distributed.agreement import exchange
from crossshard.errors import ArgumentError, CheckpointError, CheckpointMismatchError


def listed(where: object, numbers: Callable[[], list[int]], mesh: Mesh) -> list[int]:
    """The numbers of the checkpoints, as the first process sees them.

    Raises:
      CheckpointError: it cannot see them, in every process.
    """
    own: Any = []
    if jax.process_index() == 0:
        try:
            own = numbers()
        except (OSError, ImportError) as error:
            own = str(error)
    found = json.loads(exchange("Checkpoints", json.dumps(own), mesh)[0])
    if isinstance(found, str):
        raise CheckpointError(
            f"{where} cannot be used as a folder of checkpoints: {found}. Choose a folder that "
            f"this user may write to."
        )
    return [int(number) for number in found]


def agree_to_write(reason: str, manifest: dict[str, Any], mesh: Mesh) -> str:
    """The first process's reason not to write; empty if it can.

    Raises:
      ArgumentError: the processes would write different states or data.
    """
    state = {**manifest, "data": None, "sha256": None}
    said = json.dumps([reason, _digest(state), _digest(manifest)])
    all_said = [json.loads(each) for each in exchange("save", said, mesh)]
    first = all_said[0]
    for process, own in enumerate(all_said):
        if own[1:] != first[1:]:
            what = "data" if own[1] == first[1] else "a state"
            raise ArgumentError(
                f"To save, process {process} of the mesh passed {what} other than the first one. "
                f"Every process passes the same; where all of them stand is one dict."
            )
    return str(first[0])


def agree_to_read(refused: Exception | None, mesh: Mesh) -> None:
    """Raise, in every process, what the first one that cannot read a checkpoint has found.

    Raises:
      CheckpointMismatchError: it is another step's.
      Damaged: it is damaged, as one process sees it.
    """
    kind = "" if refused is None else type(refused).__name__
    told = exchange("restore", json.dumps([kind, str(refused)]), mesh)
    found = dict(reversed([json.loads(each) for each in told]))
    if Damaged.__name__ in found:
        raise Damaged(found[Damaged.__name__])
    if CheckpointMismatchError.__name__ in found:
        raise CheckpointMismatchError(found[CheckpointMismatchError.__name__])


def _digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
