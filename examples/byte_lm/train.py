"""The command: prepare, run, and say how it went."""

import sys

from rich.console import Console

from examples.byte_lm.exit_codes import DONE, FAILED, INTERRUPTED
from examples.byte_lm.job import prepare
from examples.byte_lm.messages import print_job, print_summary
from examples.byte_lm.options import TrainOptions
from examples.byte_lm.progress import make_screen
from examples.byte_lm.record import Record
from examples.byte_lm.run import run
from examples.byte_lm.stopping import Stopping


def train_command(options: TrainOptions) -> int:
    """Train as the options say; the exit code.

    Raises:
      CrossshardError: what they ask for cannot be done, or the output cannot be written.
    """
    job = prepare(options)
    # A file or pipe has no width that lines would have to be broken for.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 1000)
    with Record(job.out) as record, Stopping() as stopping:
        print_job(console, job)
        with make_screen(console, options.steps, job.rows * options.context) as screen:
            summary = run(job, record, screen.show, screen.tell, stopping)
        print_summary(console, job, summary)
    if summary.ended == "stopped":
        return INTERRUPTED
    proven = all(one.same for one in summary.proof)
    return DONE if summary.ended == "finished" and proven else FAILED
