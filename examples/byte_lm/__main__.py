"""`python -m examples.byte_lm`: train, and end with an exit code."""

import io
import os
import sys
from collections.abc import Sequence

from crossshard.errors import CrossshardError
from examples.byte_lm.arguments import parse
from examples.byte_lm.exit_codes import FAILED, INTERRUPTED, REFUSED
from examples.byte_lm.train import train_command


def main(arguments: Sequence[str] | None = None) -> int:
    """Train as the words say; the exit code.

    0 if it did what was asked, 1 if it ran and failed, 2 with one line on stderr if what was asked
    cannot be done, 130 if the user stopped it.

    Args:
      arguments: the words after ``python -m examples.byte_lm``; those of this process if ``None``.
    """
    for stream in (sys.stdout, sys.stderr):
        # Better a question mark than no sentence, where an old encoding lacks an arrow.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        return train_command(parse(arguments))
    except CrossshardError as error:
        print("byte_lm: " + " ".join(str(error).split()), file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has left; Python would complain once more when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED


if __name__ == "__main__":
    sys.exit(main())
