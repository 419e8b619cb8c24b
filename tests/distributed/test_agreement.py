"""What processes tell each other comes back as it was, and other text is refused."""

import dataclasses
import json

import pytest

from crossshard.distributed.agreement import _LONGEST, _Call, _read
from crossshard.errors import DistributedError


def test_it_comes_back():
    told = _Call("step", "3")
    assert _read(_Call, json.dumps(dataclasses.asdict(told)), 0) == told


@pytest.mark.parametrize(
    "text",
    [
        *("", "[", "null", "3", '"step"', "[" * 100_000),
        '["step", {}]',
        '{"name": "step"}',
        '{"name": "step", "text": {"rows": 3}}',
        '{"name": "step", "text": "", "more": ""}',
        json.dumps({"name": "step", "text": "x" * _LONGEST}),
    ],
    ids=lambda text: text[:40],
)
def test_what_is_no_call_is_refused(text: str):
    with pytest.raises(DistributedError, match="holds for process 2 is not what crossshard wrote"):
        _read(_Call, text, 2)
