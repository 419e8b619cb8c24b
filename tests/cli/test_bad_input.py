"""Bad input on the command line: one line on stderr that names it, exit code 2, nothing written."""

import os
import re
from pathlib import Path

import pytest

from crossshard.cli import main
from tests.training.small import small_text


@pytest.fixture(autouse=True)
def inside(tmp_path, monkeypatch):
    """Each test stands in a folder with a text in it, and a folder that is full."""
    small_text(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "old.txt").write_text("old")
    monkeypatch.chdir(tmp_path)


def everything_in(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("", "train"),
        ("trian", "trian"),
        ("train --stesp 3", "--stesp"),
        ("train more", "more"),
        ("train --steps", "--steps"),
        ("train --steps many", "--steps.*'many'"),
        ("train --steps 0", "--steps .* 0"),
        ("train --shards three", "--shards.*'three'"),
        ("train --shards 0", "--shards .* 0"),
        ("train --shards -1", "--shards .* -1"),
        ("train --shards 9999", "9999 shards .* 1024"),
        ("train --batch 12", "12 rows .* 8 shards.*8 or 16"),
        ("train --batch 0", "--batch .* 0"),
        ("train --seed -5", "--seed .* -5"),
        ("train --learning-rate fast", "--learning-rate.*'fast'"),
        ("train --learning-rate -1", "--learning-rate .* -1"),
        ("train --learning-rate nan", "--learning-rate .* nan"),
        ("train --reduction max", "max.*mean.*sum"),
        ("train --groups 3by4", "2x4.*3by4"),
        ("train --groups [[0,1],[1,2]]", "more than once"),
        ("train --groups 2x4 --shards 4", r"range\(4\)"),
        ("train --optimizer adamm", "adamm.*adamw"),
        ("train --optimizer lbfgs", "lbfgs.*line search"),
        ("train --optimizer nowhere:sgd", "nowhere"),
        ("train --optimizer dog --learning-rate 0.1 --optimizer adafactro", "adafactro"),
        ("train --width 33", "32.*33"),
        ("train --layers 0", "layer.*0"),
        ("train --context 99999", "text.txt holds .* bytes.*--context"),
        ("train --data missing.txt", "missing.txt: No such file"),
        ("train --data text.txt/below", "below: Not a directory"),
        ("train --out full", "full holds files"),
        ("train --out text.txt", "text.txt is no folder"),
        ("train --out text.txt/below", "below"),
        ("train --out /proc/crossshard", "/proc/crossshard"),
    ],
)
def test_one_line_says_what_is_wrong(capsys, tmp_path, words, names):
    before = everything_in(tmp_path)
    given = words.split()
    if "--data" not in given and given[:1] == ["train"]:
        given += ["--data", "text.txt"]
    assert main(given) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("crossshard: ")
    assert said.err.count("\n") == 1
    assert re.search(names, said.err), said.err
    assert everything_in(tmp_path) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_named(capsys, tmp_path):
    (tmp_path / "closed").mkdir(mode=0o500)
    assert main(["train", "--data", "text.txt", "--out", "closed/out"]) == 2
    assert "no permission to write in" in capsys.readouterr().err
