"""A report has public types in it only."""

import dataclasses
import types
import typing
from typing import Any

import crossshard
from crossshard import inspection

BUILTIN = {int, float, str, bool, types.NoneType}


def types_in(hint: Any) -> set[Any]:
    """The classes in a type, those of a union or a tuple one by one."""
    inner = typing.get_args(hint)
    return set().union(*map(types_in, inner)) if inner else {hint}


def test_all_that_a_report_holds_is_public():
    public = {getattr(inspection, name) for name in inspection.__all__}
    left, seen = [crossshard.Communication], set()
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
        found = set().union(*map(types_in, held)) - BUILTIN - {Ellipsis}
        left += found - seen
    assert {each.__name__ for each in seen} == {*inspection.__all__} - {"inspect"}


def test_the_two_that_are_met_first_stand_beside_inspect():
    assert crossshard.Communication is inspection.Communication
    assert crossshard.Collective is inspection.Collective
    assert crossshard.inspect is inspection.inspect
