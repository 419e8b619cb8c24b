"""What the command says of itself."""

import builtins
import sys

import pytest

from examples.byte_lm.__main__ import main
from examples.byte_lm.arguments import parse
from examples.byte_lm.options import TrainOptions


def test_help(capsys):
    with pytest.raises(SystemExit) as leaving:
        main(["--help"])
    assert not leaving.value.code
    said = capsys.readouterr()
    assert said.err == ""
    for part in ("--shards INT", "--groups", "2x4", "default: adamw", "Ctrl-C", "exit code"):
        assert part in " ".join(said.out.split())
    assert "None" not in said.out


def test_no_words_mean_the_defaults_and_auto_means_the_same():
    assert parse([]) == TrainOptions()
    names = ("data", "learning-rate", "groups", "shards", "batch", "out", "wrt", "ema")
    names += ("master-dtype", "reduce-dtype", "loss-scale", "check-divergence")
    words = [f"--{name}" for name in names]
    assert parse([*(x for word in words for x in (word, "auto"))]) == TrainOptions()


@pytest.mark.parametrize("missing", ["crossshard", "tyro", "rich", "matplotlib"])
def test_where_a_package_is_missing_one_line_says_what_to_install(capsys, monkeypatch, missing):
    whole = builtins.__import__

    def without(name: str, *rest: object) -> object:
        if name.partition(".")[0] == missing:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return whole(name, *rest)  # type: ignore[arg-type]

    for name in list(sys.modules):
        if name.startswith("examples.byte_lm."):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", without)
    assert main([]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert missing in said.err
    assert 'pip install -e ".[examples]"' in said.err
