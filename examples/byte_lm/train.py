"""The training command: prepares a run, trains, prints the results, and picks the exit code."""

import signal

from crossshard.errors import CrossshardError
from examples.byte_lm.job import prepare
from examples.byte_lm.messages import print_job, print_summary
from examples.byte_lm.options import TrainOptions
from examples.byte_lm.processes import connect
from examples.byte_lm.record import Record, check_free
from examples.byte_lm.run import run
from examples.byte_lm.screen import Screen
from examples.byte_lm.stopping import Stopping, complain

DONE, FAILED, REFUSED, FAULTY, STOPPED = 0, 1, 2, 3, 128


def train(options: TrainOptions) -> int:
    """Train with these options and return the exit code."""
    try:
        processes = connect()
        stopping = Stopping(processes)
        if processes.is_first and not options.resume:
            check_free(options.out)
        job = prepare(options, processes)
        record = Record(options, stopping, silent=not processes.is_first)
    except CrossshardError as error:
        complain(str(error))
        return REFUSED
    tokens = job.rows * options.context
    screen = Screen(stopping, options.steps, tokens, silent=not processes.is_first)
    try:
        with stopping, record, screen:
            print_job(screen, job, record.folder)
            summary = run(job, record, screen, stopping)
            print_summary(screen, summary, record, _why(stopping))
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
        saved = options.save_every is not None and not stopping.failure
        if saved:
            screen.say(f"Saved after step {summary.steps}: --resume goes on from there.")
        # A machine that is taken away asks for no more than that.
        ends_well = saved and stopping.signal == signal.SIGTERM
        return DONE if ends_well else STOPPED + stopping.signal
    right = summary.verification is None or summary.verification.ok
    done = summary.ended == "finished" and right and not stopping.failure
    return DONE if done else FAILED


def _why(stopping: Stopping) -> str:
    if stopping.signal is None:
        return f": {stopping.failure}"
    if stopping.signal == signal.SIGINT:
        return ", as you asked"
    return f", by {signal.Signals(stopping.signal).name}"
