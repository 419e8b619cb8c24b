"""A report has public types in it only."""

import dataclasses
import subprocess
import sys
import types
import typing
from typing import Any

import pytest

import crossshard
from crossshard import tools
from tests.tools.cli.command import PATIENCE

BUILTIN = {int, float, str, bool, types.NoneType}


def types_in(hint: Any) -> set[Any]:
    """The classes in a type, those of a union or a tuple one by one."""
    inner = typing.get_args(hint)
    return set().union(*map(types_in, inner)) if inner else {hint}


CALLED = {"doctor", "inspect", "plan", "topology", "verify"}


def test_all_that_a_report_holds_is_public():
    public = {getattr(tools, name) for name in tools.__all__}
    left, seen = [tools.Communication, tools.Diagnosis, tools.Plan, tools.Verification], set()
    while left:
        kind = left.pop()
        assert kind in public, kind
        seen.add(kind)
        hints = typing.get_type_hints(kind)
        held = [hints[field.name] for field in dataclasses.fields(kind)]
        properties = (getattr(kind, name) for name in dir(kind) if not name.startswith("_"))
        held += [
            typing.get_type_hints(each.fget)["return"]
            for each in properties
            if isinstance(each, property)
        ]
        found = set().union(*map(types_in, held)) - BUILTIN - {Any, Ellipsis}
        left += found - seen
    assert {each.__name__ for each in seen} == {*tools.__all__} - CALLED - {"Topology"}


def test_a_tool_is_loaded_when_it_is_asked_for():
    script = """
import sys, crossshard
tools = lambda: (each for each in sys.modules if each.startswith("crossshard.tools."))
loaded = lambda: {each.split(".")[2] for each in tools()}
assert not loaded(), loaded()
crossshard.tools.inspect
assert loaded() == {"inspection"}, loaded()
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=PATIENCE)


def test_names_are_there_by_themselves_and_others_are_refused():
    assert set(dir(tools)) == set(tools.__all__)
    with pytest.raises(AttributeError, match=r"'crossshard\.tools' has no attribute 'nothing'"):
        tools.nothing  # noqa: B018
    with pytest.raises(AttributeError, match="'crossshard' has no attribute 'nothing'"):
        crossshard.nothing  # noqa: B018
    assert crossshard.inspect is tools.inspect
