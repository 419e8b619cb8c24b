"""The training command: prepares a run, trains, and prints the results."""

import signal

from crossshard.errors import CrossshardError
from examples.byte_lm.console import complain, make_console
from examples.byte_lm.exit_codes import DONE, FAILED, FAULTY, REFUSED, STOPPED
from examples.byte_lm.job import prepare
from examples.byte_lm.messages import print_job, print_summary
from examples.byte_lm.options import TrainOptions
from examples.byte_lm.processes import connect
from examples.byte_lm.progress import Screen
from examples.byte_lm.record import Record
from examples.byte_lm.run import run
from examples.byte_lm.stopping import Stopping


def train(options: TrainOptions, stopping: Stopping) -> int:
    """Train with these options and return the exit code."""
    try:
        processes = connect()
        stopping.join(processes)
        job = prepare(options, processes)
        stopping.begin()
        record = Record(
            options.out, stopping.fail, silent=not processes.is_first, resume=options.resume
        )
    except CrossshardError as error:
        complain(str(error))
        return REFUSED
    console = make_console(stopping.fail, silent=not processes.is_first)
    try:
        with record:
            print_job(console, job, record.folder)
            with Screen(console, options.steps, job.rows * options.context) as screen:
                summary = run(job, record, screen, stopping)
            print_summary(console, job, summary, record, _why(stopping))
    except CrossshardError as error:
        complain(str(error))
        return FAILED
    if stopping.failure and processes.is_first:
        where = f"{', '.join(record.written)} in {record.folder}"
        complain(f"{stopping.failure} Ended after step {summary.steps}, with {where}.")
    if summary.fault:
        if processes.is_first:
            complain(summary.fault)
        return FAULTY
    if stopping.signal is not None:
        if options.save_every and not stopping.failure:
            console.print(f"Saved after step {summary.steps}: --resume goes on from there.")
            # A machine that is taken away asks for no more than that.
            if stopping.signal == signal.SIGTERM:
                return DONE
        return STOPPED + stopping.signal
    same = summary.proof is None or summary.proof.same
    right = summary.verification is None or summary.verification.ok
    done = summary.ended == "finished" and same and right and not stopping.failure
    return DONE if done else FAILED


def _why(stopping: Stopping) -> str:
    if stopping.signal is None:
        return f": {stopping.failure}"
    if stopping.signal == signal.SIGINT:
        return ", as you asked"
    return f", by {signal.Signals(stopping.signal).name}"
