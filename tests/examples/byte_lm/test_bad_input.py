"""Bad input on the command line: one line on stderr that names it, exit code 2, nothing written."""

import os
import re
import sys
from pathlib import Path

import pytest

from examples.byte_lm.__main__ import main
from tests.examples.byte_lm.small import small_text
from tests.quick import deep


@pytest.fixture(autouse=True)
def inside(tmp_path, monkeypatch):
    """Each test stands in a folder with a text in it, and a folder that is full."""
    small_text(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "old.txt").write_text("old")
    (tmp_path / "only_small_ones.py").write_text(
        "import optax\n"
        "def sgd():\n"
        "    def update(updates, state, params=None):\n"
        "        if any('embedding' in name for name in updates):\n"
        "            raise ValueError('no embeddings, please')\n"
        "        return optax.sgd(0.1).update(updates, state, params)\n"
        "    return optax.GradientTransformation(optax.sgd(0.1).init, update)\n"
    )
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)


def everything_in(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("--steps 0", "--steps .* 0"),
        ("--shards 0", "--shards .* 0"),
        ("--shards 9999", "9999 shards .* 1024"),
        ("--batch 12", "12 rows .* 8 shards.*--batch 8"),
        ("--batch 0", "--batch .* 0"),
        ("--accumulate-steps 3 --batch 16", "16 rows .* 8 shards .* 3.*24"),
        ("--accumulate-steps 0", "--accumulate-steps .* 0"),
        deep(("--wrt nowhere/*", "wrt chooses none")),
        ("--ema 1.5", r"ema .* 1\.5"),
        ("--batch -8", "--batch .* -8"),
        ("--context 0", "--context .* 0"),
        ("--seed 4294967296", "--seed .* 4294967296"),
        ("--learning-rate 0", "--learning-rate .* 0.0"),
        ("--learning-rate inf", "--learning-rate .* inf"),
        ("--learning-rate nan", "--learning-rate .* nan"),
        ("--optimizer adamm", "adamm.*adamw"),
        deep(("--optimizer lbfgs", "optimizer.*line search")),
        ("--optimizer nowhere:sgd", "nowhere"),
        deep(("--optimizer only_small_ones:sgd", "ValueError, no embeddings")),
        ("--width 33", "32.*33"),
        ("--layers 0", "layer.*0"),
        ("--context 99999", "text.txt holds .* bytes.*--context"),
        ("--data missing.txt", "missing.txt: No such file"),
        ("--data text.txt/below", "below: Not a directory"),
        ("--out full", "full holds files"),
        ("--out text.txt", "text.txt: File exists"),
        deep(("--out /proc/crossshard", "/proc/crossshard")),
        ("--save-every 5", "--save-every needs the folder of the run"),
        ("--resume", "--resume needs the folder of the run"),
        ("--save-every 0 --out out", "--save-every must be at least 1"),
        ("--nonfinite quarantine --reduction sum", "the reduction is SUM"),
    ],
)
def test_one_line_says_what_is_wrong(capsys, tmp_path, words, names):
    before = everything_in(tmp_path)
    given = words.split()
    if "--data" not in given:
        given += ["--data", "text.txt"]
    assert main(given) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("byte_lm: ")
    assert said.err.count("\n") == 1
    assert re.search(names, said.err), said.err
    assert everything_in(tmp_path) == before


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("--stesp 3", "--stesp"),
        ("more", "more"),
        ("--steps", "--steps"),
        ("--steps many", "--steps.*many"),
        ("--shards three", "--shards.*three"),
        ("--learning-rate fast", "--learning-rate.*fast"),
        ("--reduction max", "max.*--reduction"),
    ],
)
def test_what_cannot_be_read_is_named_with_the_way_to_help(capsys, tmp_path, words, names):
    before = everything_in(tmp_path)
    with pytest.raises(SystemExit) as leaving:
        main(words.split())
    assert leaving.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert re.search(names, said.err.replace("\n", " ")), said.err
    assert "--help" in said.err
    assert everything_in(tmp_path) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_named(capsys, tmp_path):
    (tmp_path / "closed").mkdir(mode=0o500)
    assert main(["--data", "text.txt", "--out", "closed/out"]) == 2
    assert "closed/out: Permission denied" in capsys.readouterr().err
