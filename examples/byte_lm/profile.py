"""Profile: a trace of a few steps, for Perfetto or XProf."""

import itertools
from collections.abc import Callable, Iterator

import jax

from examples.byte_lm.folder import cannot_write
from examples.byte_lm.loop import Step
from examples.byte_lm.options import PROFILED
from examples.byte_lm.record import Record

NAME = "profile"
# After the fourth step comes an evaluation on held-out text.
_TRACED = 3


def traced(steps: Iterator[Step], record: Record, fail: Callable[[str], None]) -> Iterator[Step]:
    """The steps, of which a few are traced to the folder ``profile`` of the record.

    Args:
      steps: takes each step when it is drawn.
      record: the record of the run.
      fail: called with a message if the trace cannot be written.
    """
    yield from itertools.islice(steps, PROFILED - _TRACED)
    folder = record.folder / NAME
    options = jax.profiler.ProfileOptions()
    # Calls of Python functions would be most of the trace.
    options.python_tracer_level = 0
    jax.profiler.start_trace(folder, create_perfetto_trace=True, profiler_options=options)
    try:
        yield from itertools.islice(steps, _TRACED)
    finally:
        try:
            jax.profiler.stop_trace()
            record.written.append(NAME)
        except OSError as error:
            fail(cannot_write(folder, error))
        except RuntimeError as error:
            fail(f"Cannot write to {folder}: {error}.")
    yield from steps
