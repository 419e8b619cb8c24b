"""Gives every test eight virtual CPU devices, and makes our own warnings errors."""

import functools
import gc
import importlib.metadata
import importlib.util
import itertools
import os
import re
import signal
import sys
import threading
from pathlib import Path

import hypothesis
import jaxtyping
import pytest

from tests import shapes

DEVICES = 8
# Halves what a test costs: without them XLA emits fusions by MLIR, and splits a program in 32.
QUICK_TO_COMPILE = ["--xla_cpu_parallel_codegen_split_count=1"]
# XLA ends the process at a flag that it does not know.
if tuple(map(int, importlib.metadata.version("jaxlib").split(".")[:2])) < (0, 11):
    QUICK_TO_COMPILE.append("--xla_cpu_use_fusion_emitters=false")


def _set_up_cpu_devices() -> None:
    if "jax" in sys.modules:
        raise RuntimeError(
            "jax was imported before tests/conftest.py could set up its CPU devices. A pytest "
            "plugin did it, or a -p or -W option that names a module: leave that out."
        )
    # In-process collectives deadlock once steps queue up, unless the backend finds at least two
    # processors per device; 32 holds for eight devices whatever this machine has.
    os.environ["NPROC"] = "32"
    os.environ["JAX_PLATFORMS"] = "cpu"
    # Most of the time goes to compiling, so XLA and LLVM do the least they can to a program.
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    # Read when Keras is imported.
    os.environ["KERAS_BACKEND"] = "jax"
    # Else each of the processes that tests start compiles the package again, for half a second.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    # JAX refuses a count that is given in both ways, and xdist's workers inherit ours.
    os.environ.pop("JAX_NUM_CPU_DEVICES", None)
    count = "--xla_force_host_platform_device_count"
    inherited = re.sub(rf"{count}=\S*", "", os.environ.get("XLA_FLAGS", ""))
    os.environ["XLA_FLAGS"] = " ".join(
        [*QUICK_TO_COMPILE, *inherited.split(), f"{count}={DEVICES}"]
    )


_set_up_cpu_devices()
# What the stages say of shapes and dtypes is checked at every call; before the package is imported.
jaxtyping.install_import_hook(
    ["crossshard.collectives.sums", "crossshard.pipeline"], f"{shapes.__name__}.checked"
)

# A shell ignores Ctrl-C for what it starts in the background, and tests send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A compilation takes as long as it takes, so nothing is timed; and a failure on one machine must
# be a failure on the next.
hypothesis.settings.register_profile(
    "crossshard",
    deadline=None,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("crossshard")


def pytest_configure(config: pytest.Config) -> None:
    """Makes every warning class of ours an error: a test that provokes one must expect it."""
    # Here and not above: it imports jax.
    from crossshard import errors

    for name, thing in vars(errors).items():
        if isinstance(thing, type) and issubclass(thing, Warning):
            config.addinivalue_line("filterwarnings", f"error::{errors.__name__}.{name}")
    _share_contexts()


def _share_contexts() -> None:
    """Lower a hundred programs of a thread in one context of MLIR.

    JAX made one for each until 0.12, which lowers ten in one: it takes longer than to lower a small
    program.
    """
    from jax._src.interpreters import mlir

    uses, made = itertools.count(), functools.lru_cache(4)(lambda *_: make())
    own = lambda: made(threading.get_ident(), next(uses) // 100)
    make, mlir.make_ir_context = mlir.make_ir_context, own


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips a test that needs a GPU where there is none, or no JAX for it."""
    plugins = map(importlib.util.find_spec, ("jax_cuda12_plugin", "jax_cuda13_plugin"))
    there = any(Path("/dev").glob("nvidia[0-9]*")) and any(plugins)
    if item.get_closest_marker("gpu") and not there:
        pytest.skip("there is no GPU, or no JAX for CUDA")


def pytest_collection_finish() -> None:
    """Leaves what was imported out of every later collection of garbage, a tenth of all time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def soak_steps() -> int:
    """How long a soak test runs: SOAK_STEPS, or enough to have met every deadlock we know of."""
    return int(os.environ.get("SOAK_STEPS", "20000"))
