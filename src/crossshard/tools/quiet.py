"""Keeps the compilers' plugins quiet, and lets several run at once."""

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator


def for_tpus() -> None:
    """Set what libtpu reads when it is loaded, unless the user has."""
    for name, value in {
        # There is no TPU here, nor a server that could tell which one.
        "TPU_SKIP_MDS_QUERY": "1",
        # Nothing is run, so two processes may compile at once.
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_LOG_DIR": "disabled",
    }.items():
        os.environ.setdefault(name, value)


def for_gpus() -> None:
    """Set what JAX for CUDA reads when it is loaded, unless the user has."""
    # There is no GPU here to be compatible with.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")


@contextlib.contextmanager
def quiet(*descriptors: int) -> Iterator[None]:
    """Keep what C++ writes to stderr off the screen; if this raises, the errors say what matters.

    If the process is aborted meanwhile, what was written is lost with it.

    Args:
      *descriptors: those that C++ writes to; 2, which is stderr, if there are none.

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
                # There is no such stream.
                continue
            stack.callback(os.close, kept)
            hidden = stack.enter_context(tempfile.TemporaryFile())
            os.dup2(hidden.fileno(), descriptor)
            stack.callback(os.dup2, kept, descriptor)
        yield
