"""`python -m examples.byte_lm`: train, and end with an exit code."""

import signal
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Train with the given options and return the exit code, which ``--help`` explains.

    Args:
      arguments: the words after ``python -m examples.byte_lm``; those of this process if ``None``.
    """
    # Not at the top: this takes seconds, in which Ctrl-C must end the process.
    import tyro

    from examples.byte_lm.options import TrainOptions
    from examples.byte_lm.train import train

    return train(tyro.cli(TrainOptions, prog="python -m examples.byte_lm", args=arguments))


if __name__ == "__main__":
    # Until the training begins a signal ends the process at once: an exception may be caught.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(main())
