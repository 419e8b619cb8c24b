"""Keeps what compilers and collectives print off the screen."""

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator


@contextlib.contextmanager
def quiet(*descriptors: int) -> Iterator[None]:
    """Keep what C++ writes to stderr off the screen. What matters is in the exceptions it raises.

    If the process is aborted meanwhile, that output is lost.

    Args:
      *descriptors: the file descriptors to silence; 2, which is stderr, if there are none.

    >>> import os
    >>> with quiet():
    ...     _ = os.write(2, b"WARNING: no TPU was found")
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    with contextlib.ExitStack() as stack:
        for descriptor in descriptors or (2,):
            try:
                kept = os.dup(descriptor)
            except OSError:
                continue  # it is not open
            stack.callback(os.close, kept)
            hidden = stack.enter_context(tempfile.TemporaryFile())
            os.dup2(hidden.fileno(), descriptor)
            stack.callback(os.dup2, kept, descriptor)
        yield
