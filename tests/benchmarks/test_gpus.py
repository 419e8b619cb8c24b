"""The bench of GPU clusters: all steps are one step, and rows are kept until measured again."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from benchmarks import by_hand, gpus
from benchmarks.shapes import Shapes, transformer

THEIRS = [name for name in gpus.STEPS if not name.startswith("ours")]
# What XLA for CPUs takes, too.
ON_CPUS = [name for name in THEIRS if "MaxText" not in name]


def small(scan: bool, checkpoint: bool) -> Shapes:
    # Wide enough that matrices are split.
    return transformer(2, 512, 16, rows=1, scan=scan, checkpoint=checkpoint, heads=2)


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return jax.make_mesh((8,), (by_hand.AXIS,), axis_types=(AxisType.Auto,))


def gradients(name: str, mesh: Mesh, model: Shapes) -> list[np.ndarray]:
    """The first moments after one step, flat: the mean gradients times 1 - b1."""
    lowered = gpus.STEPS[name](mesh, model)
    types = jax.tree.leaves(lowered.args_info)
    whole = jax.tree.leaves(model.params)
    random = np.random.default_rng(0)
    given = [np.float32(0.02 * random.normal(size=leaf.shape)) for leaf in whole]
    zeros = [np.zeros(each.shape, each.dtype) for each in types[len(given) : -1]]
    tokens = random.integers(0, 512, types[-1].shape, np.int32)
    args, _ = jax.tree.unflatten(lowered.in_tree, [*given, *zeros, tokens])
    compiled = lowered.compile()
    _, state = compiled(*jax.device_put(args, compiled.input_shardings[0]))
    # After the number of steps.
    moments = jax.tree.leaves(state)[1 : 1 + len(whole)]
    return [np.ravel(x)[: leaf.size] for x, leaf in zip(moments, whole, strict=True)]


@pytest.mark.deep
@pytest.mark.parametrize("name", ON_CPUS)
def test_a_step_has_the_gradients_of_the_replicated_one(name: str, mesh: Mesh):
    model = small(scan=True, checkpoint=True)
    wanted = gradients("by hand, replicated", mesh, model)
    for got, want in zip(gradients(name, mesh, model), wanted, strict=True):
        assert np.linalg.norm(want) > 0
        # Products are in bfloat16, and so are GSPMD's sums.
        assert np.linalg.norm(got - want) < 0.03 * np.linalg.norm(want)


def test_parts_rest_on_their_shards_and_are_gathered_in_16_bits(mesh: Mesh):
    model = small(scan=True, checkpoint=True)
    row = gpus.measured("by hand, params sharded", mesh, model)
    whole = gpus.measured("by hand, replicated", mesh, model)
    assert row["arguments"] < whole["arguments"] / 6
    # Small arrays are summed whole, and XLA for CPUs gathers 16 bits in 32.
    assert row["sent"] == pytest.approx(gpus.least("ours, params sharded", 8, model), rel=0.5)


def test_what_our_step_must_send():
    once, twice = (transformer(scan=True, checkpoint=each) for each in (False, True))
    words = 50304 * 2048
    assert gpus.least("ours, sharded", 8, once) == 7 / 8 * 8 * once.parameters
    assert gpus.least("ours, params sharded", 8, once) == 7 / 8 * 6 * once.parameters
    again = once.parameters - words - 2048
    assert gpus.least("ours, params sharded", 8, twice) == 7 / 8 * (6 * once.parameters + 2 * again)
    assert gpus.least("by hand, params sharded", 8, once) is None


@pytest.mark.deep
def test_a_row_is_measured_again_alone(
    mesh: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(gpus, "cluster", lambda _: mesh)
    monkeypatch.setattr(gpus, "MODELS", {"scan": small(True, False)})
    words = ["--out", str(tmp_path / "new"), "--gpus", "8", "--steps"]
    gpus.main([*words, "by hand, sharded", "by hand, replicated"])
    first = json.loads((tmp_path / "new" / "gpus.json").read_text())
    assert [row["step"] for row in first] == ["by hand, sharded", "by hand, replicated"]
    page = (tmp_path / "new" / "gpus.md").read_text()
    # In the order of the steps, not that of the command line.
    assert page.index("| by hand, replicated |") < page.index("| by hand, sharded |")
    (tmp_path / "new" / "gpus.json").write_text(
        json.dumps([each | {"sent": 1e9} for each in first])
    )
    gpus.main([*words, "by hand, sharded"])
    again = json.loads((tmp_path / "new" / "gpus.json").read_text())
    assert again == [first[0], first[1] | {"sent": 1e9}]
    # And only drawn.
    capsys.readouterr()
    gpus.main(words)
    assert len(capsys.readouterr().out.splitlines()) == 1
    assert json.loads((tmp_path / "new" / "gpus.json").read_text()) == again


def test_a_step_that_there_is_not_is_refused(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        gpus.main(["--steps", "theirs"])
    assert "theirs" in capsys.readouterr().err
