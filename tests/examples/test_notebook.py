"""The notebook that `make notebook` makes of examples/notebook.py runs, cell by cell."""

import re
from pathlib import Path
from typing import Any

import pytest

jupytext = pytest.importorskip("jupytext")
nbformat = pytest.importorskip("nbformat")

SCRIPT = Path(__file__).parents[2] / "examples" / "notebook.py"


@pytest.fixture(scope="module")
def notebook() -> Any:
    return jupytext.read(SCRIPT)


def test_it_is_a_notebook_whose_text_is_no_code(notebook: Any):
    nbformat.validate(notebook)
    kinds = [cell.cell_type for cell in notebook.cells]
    assert kinds == ["markdown", *["markdown", "code"] * 5]
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    assert '"""' not in text
    assert re.findall(r"^## (.*)", text, re.MULTILINE) == [
        *("Install", "Devices", "The step", "Proof", "A checkpoint")
    ]


def test_its_cells_are_the_script(notebook: Any):
    code = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    lines = lambda text: [line for line in text.splitlines() if line and line[:1] != "#"]
    script = re.sub(r'^""".*?^"""$', "", SCRIPT.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert lines(code) == lines(script)


@pytest.mark.deep
def test_its_cells_run_one_after_the_other(notebook: Any, capsys: pytest.CaptureFixture[str]):
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell in notebook.cells:
        if cell.cell_type == "code":
            exec(compile(cell.source, "cell", "exec"), names)
    printed = capsys.readouterr().out
    assert "the same next step from the checkpoint: True" in printed
    assert "all 2 parameters take the step of one device" in printed
