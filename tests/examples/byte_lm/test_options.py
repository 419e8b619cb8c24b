"""Options: what the command says of them, and their defaults."""

import pytest
import tyro

from examples.byte_lm.__main__ import main
from examples.byte_lm.options import TrainOptions


def test_help(capsys):
    with pytest.raises(SystemExit) as leaving:
        main(["--help"])
    assert not leaving.value.code
    said = capsys.readouterr()
    assert said.err == ""
    for part in ("--shards", "INT", "default: adamw", "Ctrl-C", "exit code"):
        assert part in " ".join(said.out.split())


def test_no_words_mean_the_defaults():
    assert tyro.cli(TrainOptions, args=[]) == TrainOptions()


@pytest.mark.parametrize(("shards", "rows"), [(1, 16), (3, 18), (8, 16), (16, 16), (24, 24)])
def test_the_batch_suits_the_shards(shards, rows):
    assert TrainOptions().rows(shards) == rows
