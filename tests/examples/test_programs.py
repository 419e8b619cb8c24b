"""Programs as people have them, moved over in ten lines: each trains as it does on one device."""

import re
from typing import Any

import optax
import pytest

from crossshard.errors import CrossshardError, DoubleReductionError
from examples._patch import patched
from examples.programs import __main__ as command
from examples.programs.catalogue import PROGRAMS, difference, table
from tests.quick import deep_but
from tests.test_docs import ROOT, blocks

PAGE = ROOT / "docs" / "guide" / "programs.md"
NAMED = {each.name: each for each in PROGRAMS}
# Of each way in one, and one that is refused at first.
QUICK = {"lookahead", "ppo"}
IN_SHARD_MAP = [name for name, each in NAMED.items() if "shard_map" in each.way]
REFUSED = [name for name, each in NAMED.items() if each.refused]

TOLERANCE = 1e-6


def sgd(rate: float = 0.01) -> Any:
    return optax.sgd(rate)


@pytest.mark.parametrize("name", deep_but(QUICK, NAMED))
def test_with_sgd_eight_shards_train_as_one_device_does(name: str):
    one, eight = (NAMED[name].run(kind, sgd()) for kind in ("before", "after"))
    assert difference(eight, one) < TOLERANCE


@pytest.mark.parametrize("name", deep_but(QUICK, REFUSED))
def test_the_first_try_is_refused_with_the_words_to_write(name: str):
    program = NAMED[name]
    refused, text = program.refused, program.first_try()
    assert refused is not None
    assert text != program.text("after")
    with pytest.raises(CrossshardError) as error:
        program.module(text).main()
    assert refused.said in str(error.value)
    assert refused.named in str(error.value)


@pytest.mark.parametrize("name", deep_but(QUICK, IN_SHARD_MAP))
def test_gradients_that_jax_has_summed_are_refused(name: str):
    program = NAMED[name]
    text = re.sub(r"crossshard\.(value_and_)?grad\b", r"jax.\1grad", program.text("after"))
    assert text != program.text("after")
    with pytest.raises(DoubleReductionError, match=r"crossshard\.value_and_grad"):
        program.module(text).main()


@pytest.mark.parametrize("name", NAMED)
def test_at_most_ten_lines_are_changed(name: str):
    program = NAMED[name]
    assert 1 <= program.changed <= 10
    assert "import crossshard" in program.diff()
    assert "crossshard" not in program.text("before")


def test_there_are_all_kinds():
    assert len(PROGRAMS) >= 15
    libraries = {"JAX", "Flax Linen", "Flax NNX", "Equinox", "Haiku", "Keras"}
    assert {each.library for each in PROGRAMS} == libraries
    assert len({each.way for each in PROGRAMS}) == 4
    assert len({each.what for each in PROGRAMS}) == len(PROGRAMS)
    files = {path.stem for path in PROGRAMS[0].path.parent.glob("[a-z]*.py")}
    assert files == {*NAMED, "catalogue"}


def test_changes_that_are_not_in_the_program_are_refused():
    program = NAMED["ppo"]
    text = program.text("after")
    assert patched(program.text("before"), program.diff()) == text
    with pytest.raises(ValueError, match="line 59 is not as the patch says"):
        patched(text.replace("step.init(params)", "step.init(agent)"), program.diff(), back=True)


def test_the_page_lists_them_and_shows_what_was_changed():
    assert table("../../examples/programs") in PAGE.read_text()
    shown = [block.lstrip("\n") for block in blocks(PAGE, "diff")]
    assert len(shown) >= 3
    assert set(shown) <= {each.diff() for each in PROGRAMS}


def test_the_command_lists_and_runs_them(capsys: pytest.CaptureFixture[str]):
    command.main(["lookahead"])
    assert re.search(r"differ by \d\.\de-0[789]$", capsys.readouterr().out.strip())
    with pytest.raises(SystemExit, match="no program called gam"):
        command.main(["gam"])
    assert "lookahead " in capsys.readouterr().out


@pytest.mark.parametrize("found", [{"a": [1.0, 2.1]}, {"a": [1.0, 3.0]}])
def test_what_differs_is_measured(found: Any):
    expected = {"a": [1.0, 2.0]}
    assert difference(found, expected) == pytest.approx((found["a"][1] - 2) / 2)
    with pytest.raises(ValueError, match="only once"):
        difference({"b": found["a"]}, expected)
