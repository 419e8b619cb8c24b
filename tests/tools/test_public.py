"""A report has public types in it only."""

import dataclasses
import types
import typing
from typing import Any

import pytest

import crossshard
from crossshard import tools

BUILTIN = {int, float, str, bool, types.NoneType}


def types_in(hint: Any) -> set[Any]:
    """The classes in a type, those of a union or a tuple one by one."""
    inner = typing.get_args(hint)
    return set().union(*map(types_in, inner)) if inner else {hint}


CALLED = {"count_flops", "doctor", "inspect", "peak_flops", "plan", "topology", "verify"}


def test_all_that_a_report_holds_is_public():
    public = {getattr(tools, name) for name in tools.__all__}
    seen = set()
    left = [tools.Communication, tools.Diagnosis, tools.Flops, tools.Plan, tools.Verification]
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
    assert {each.__name__ for each in seen} == {*tools.__all__} - CALLED - {"Meter", "Topology"}


def test_names_are_there_by_themselves_and_others_are_refused():
    with pytest.raises(AttributeError, match="'crossshard' has no attribute 'nothing'"):
        crossshard.nothing  # noqa: B018
    assert crossshard.inspect is tools.inspect
