"""Programs that several runs of the example compile are compiled once; lines are told at once."""

from collections.abc import Callable

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

_OPTIONS = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")


@pytest.fixture(scope="package", autouse=True)
def compiled_once(tmp_path_factory: pytest.TempPathFactory):
    """Keeps compiled programs in a folder, while these tests run; most of their time went there."""
    before = [getattr(jax.config, option) for option in _OPTIONS]
    _set(tmp_path_factory.mktemp("compiled").as_posix(), 0.0)
    yield
    _set(*before)


@pytest.fixture
def tell(capsys: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    """Prints lines while the test runs."""

    def told(text: str) -> None:
        with capsys.disabled():
            print(f"\n{text}", end="", flush=True)

    return told


def _set(*values: object) -> None:
    for option, value in zip(_OPTIONS, values, strict=True):
        jax.config.update(option, value)
    # JAX looks for the folder when it compiles for the first time.
    compilation_cache.reset_cache()
