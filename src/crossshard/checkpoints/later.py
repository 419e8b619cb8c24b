"""Later: an Orbax handler for the manifest, which is made while the arrays are written."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import future


class LaterHandler(ocp.AsyncCheckpointHandler):
    """Writes, in the background and in the first process, what a function returns."""

    async def async_save(self, directory: Any, args: "Later") -> list[Any]:
        """Begin; the files are there before the checkpoint is complete."""

        async def write() -> None:
            if jax.process_index() == 0:
                for name, text in args.files().items():
                    (directory / name).write_text(text)

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
      files: returns texts by the names of their files; called in a thread.
    """

    files: Callable[[], dict[str, str]]
