"""Nothing that is read from disk or from another process is executed: no source unpickles."""

import ast
from pathlib import Path

SOURCES = sorted((Path(__file__).parents[1] / "src").rglob("*.py"))
# Modules that execute what they load, or ways to execute text.
MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "yaml"}
CALLS = {"eval", "exec", "compile", "__import__"}


def found_in(source: Path) -> set[str]:
    """The modules and calls in a file that execute what they are given."""
    found = set()
    for node in ast.walk(ast.parse(source.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            found |= {node.func.id} & CALLS
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            found.add("allow_pickle")
        found |= {name.split(".")[0] for name in names} & MODULES
    return found


def test_no_source_unpickles():
    by_file = {str(path).split("/src/")[1]: found_in(path) for path in SOURCES}
    assert len(by_file) > 50
    assert {name: found for name, found in by_file.items() if found} == {}
