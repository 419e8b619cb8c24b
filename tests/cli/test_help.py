"""What the command line says of itself, and what it says where it cannot run."""

import builtins
import sys

import pytest

import crossshard
from crossshard.cli import main
from crossshard.cli.arguments import parse
from crossshard.training.options import TrainOptions


def test_the_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"crossshard {crossshard.__version__}\n"


@pytest.mark.parametrize(
    ("words", "has"),
    [
        (["--help"], ["train", "--version", "every shard steps correctly"]),
        (["train", "--help"], ["--shards INT", "--groups", "2x4", "default: adamw", "Ctrl-C"]),
    ],
)
def test_help(capsys, words, has):
    with pytest.raises(SystemExit) as leaving:
        main(words)
    assert not leaving.value.code
    said = capsys.readouterr()
    assert said.err == ""
    for part in has:
        assert part in " ".join(said.out.split())
    assert "None" not in said.out


def test_no_words_mean_the_defaults_and_auto_means_the_same():
    assert parse(["train"]) == TrainOptions()
    words = [f"--{name}" for name in ("data", "learning-rate", "groups", "shards", "batch", "out")]
    assert parse(["train", *(x for word in words for x in (word, "auto"))]) == TrainOptions()


@pytest.mark.parametrize("missing", ["tyro", "rich", "matplotlib"])
def test_where_an_extra_is_missing_one_line_says_what_to_install(capsys, monkeypatch, missing):
    whole = builtins.__import__

    def without(name: str, *rest: object) -> object:
        if name.partition(".")[0] == missing:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return whole(name, *rest)  # type: ignore[arg-type]

    for name in list(sys.modules):
        if name.startswith(("crossshard.cli.", "crossshard.training.")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", without)
    assert main(["train"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert missing in said.err
    assert 'pip install "crossshard[train]"' in said.err
