"""A small run to test with: a text that is quickly learnt, a model that compiles in a second."""

from pathlib import Path

from examples.byte_lm.options import TrainOptions


def small_text(folder: Path) -> Path:
    """A file of some thousand bytes in which the next one can be told."""
    path = folder / "text.txt"
    path.write_text("".join(f"{n} sheep jumped over {n % 7} fences.\n" for n in range(600)))
    return path


def small_options(folder: Path, **changes: object) -> TrainOptions:
    """Options for a run on it, with its output below the same folder."""
    given: dict[str, object] = {
        "data": small_text(folder),
        "out": folder / "out",
        "layers": 1,
        "width": 32,
        "context": 16,
        "steps": 6,
        "shards": 4,
        **changes,
    }
    return TrainOptions(**given)  # type: ignore[arg-type]
