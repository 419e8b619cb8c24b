"""What the command says of itself."""

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
    for part in ("--shards INT", "--groups", "2x4", "default: adamw", "Ctrl-C"):
        assert part in " ".join(said.out.split())
    assert "None" not in said.out


def test_no_words_mean_the_defaults_and_auto_means_the_same():
    assert parse([]) == TrainOptions()
    words = [f"--{name}" for name in ("data", "learning-rate", "groups", "shards", "batch", "out")]
    assert parse([*(x for word in words for x in (word, "auto"))]) == TrainOptions()
