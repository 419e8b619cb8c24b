"""Every fault of `make mutants` can be planted: its text stands once, and the result parses."""

import ast
import shutil

from tools import mutants


def test_every_fault_can_be_planted(tmp_path):
    faults, wrong = mutants.read_faults(), []
    for fault in faults:
        file = tmp_path / fault.path
        file.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(mutants.PACKAGE / fault.path, file)
        try:
            fault.plant(tmp_path)
            ast.parse(file.read_text(encoding="utf-8"))
        except (ValueError, SyntaxError) as error:
            wrong.append(f"{fault.path}: {fault.what}: {error}")
    assert not wrong, "\n".join(wrong)
    assert len(faults) >= 120
    rooms = "_check.py _hash.py _jax.py _mesh.py errors.py guards.py checkpoints collectives"
    rooms += " distributed gradients jaxprs model nnx optimizer pipeline shards step tools"
    assert {fault.path.split("/")[0] for fault in faults} == set(rooms.split())
