"""Later: an Orbax handler for the manifest, which is made while the arrays are written."""

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import future

from crossshard.checkpoints.manifest import FILE


class LaterHandler(ocp.AsyncCheckpointHandler):
    """Writes, in the background and in the first process, what a function returns."""

    async def async_save(self, directory: Any, args: "Later") -> list[Any]:
        """Begin; the file is there before the checkpoint is complete."""

        async def write() -> None:
            if jax.process_index() == 0:
                (directory / FILE).write_text(json.dumps(args.body()))

        return [future.CommitFutureAwaitingContractedSignals(write(), name="crossshard")]

    def save(self, *args: Any, **kwargs: Any) -> None:
        """Not used: the arrays are written in the background, too."""
        raise NotImplementedError

    def restore(self, *args: Any, **kwargs: Any) -> None:
        """Not used: crossshard reads the file itself, with distrust."""
        raise NotImplementedError


# Orbax knows no handler that has arguments for one of both only.
@ocp.args.register_with_handler(LaterHandler, for_save=True, for_restore=True)
@dataclasses.dataclass
class Later(ocp.args.CheckpointArgs):
    """What to write.

    Attributes:
      body: returns it, in a thread.
    """

    body: Callable[[], dict[str, Any]]
