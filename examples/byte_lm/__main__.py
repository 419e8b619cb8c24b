"""`python -m examples.byte_lm`: train, and end with an exit code."""

import io
import os
import signal
import sys
from collections.abc import Sequence

from examples.byte_lm.exit_codes import REFUSED
from examples.byte_lm.stopping import Stopping


def main(arguments: Sequence[str] | None = None) -> int:
    """Train with the given options and return the exit code.

    0 if it did what was asked, 1 if it ran and failed, 2 with a complaint on stderr if what was
    asked cannot be done, 128 and the number of the signal, such as 130, if one stopped it.

    Args:
      arguments: the words after ``python -m examples.byte_lm``; those of this process if ``None``.
    """
    _open_streams()
    with Stopping() as stopping:
        try:
            # Not at the top: this takes seconds, and the signal handler must be set before.
            from examples.byte_lm.arguments import parse
            from examples.byte_lm.train import train
        except ModuleNotFoundError as error:
            missing = str(error.name).partition(".")[0]
            print(
                f"byte_lm: {missing} is not installed. Run, where you cloned crossshard: "
                f'{sys.executable} -m pip install -e ".[examples]"',
                file=sys.stderr,
            )
            return REFUSED
        return train(parse(arguments), stopping)


def _open_streams() -> None:
    """Make it safe to write to stdout and stderr, whatever they are."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            # It was closed. Otherwise the next open file would take its place.
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - for as long as we run
        stream = getattr(sys, name)
        # Print a question mark where an old encoding lacks an arrow.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


if __name__ == "__main__":
    code = main()
    # All is written: from here on Ctrl-C may end the process silently.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(code)
