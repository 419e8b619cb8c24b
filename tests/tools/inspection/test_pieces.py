"""Which piece of an input each device holds, and which devices that makes one shard."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from crossshard.tools.inspection.pieces import input_pieces, is_whole
from crossshard.tools.inspection.replicas import joined_devices, shards
from tests.tools.steps import GRID

PIECES = {
    P(): [0, 0, 0, 0, 0, 0, 0, 0],
    P("data"): [0, 0, 1, 1, 2, 2, 3, 3],
    P(None, "data"): [0, 0, 1, 1, 2, 2, 3, 3],
    P("model"): [0, 1, 0, 1, 0, 1, 0, 1],
    P("data", "model"): [0, 1, 2, 3, 4, 5, 6, 7],
    P(("model", "data")): [0, 1, 2, 3, 4, 5, 6, 7],
}


def layouts(*args: Any) -> list[tuple[int, ...]]:
    return input_pieces(jax.jit(lambda *args: sum(x.sum() for x in args)).lower(*args).compile())


def placed(spec: Any, mesh: Mesh = GRID) -> Any:
    return jax.ShapeDtypeStruct((16, 8), jnp.float32, sharding=NamedSharding(mesh, spec))


def test_pieces_by_hand():
    for spec, pieces in PIECES.items():
        (found,) = layouts(placed(spec))
        assert (list(found), is_whole(found)) == (pieces, spec == P()), spec
    # They are in the order of the mesh.
    backwards = Mesh(GRID.devices[::-1, ::-1], ("data", "model"))
    assert list(layouts(placed(P("model"), backwards))[0]) == PIECES[P("model")]


def test_what_the_program_leaves_out_has_no_layout():
    x = placed(P("data"))
    lowered = jax.jit(lambda unused, x: x.sum()).lower(x, x)
    assert len(input_pieces(lowered.compile())) == 1


ALL = ((0, 1, 2, 3, 4, 5, 6, 7),)
PAIRS = ((0, 1), (2, 3), (4, 5), (6, 7))
FOURS = ((0, 2, 4, 6), (1, 3, 5, 7))
EIGHT = tuple(range(8))
WHOLE = (0,) * 8
PAIRED = (0, 0, 1, 1, 2, 2, 3, 3)


@pytest.mark.parametrize(
    ("pieces", "joining", "gathering", "data", "expected"),
    [
        (WHOLE, (ALL,), (), EIGHT, 8),
        (WHOLE, (FOURS, PAIRS), (), EIGHT, 8),
        (WHOLE, (PAIRS,), (), EIGHT, 2),
        (WHOLE, (), (), EIGHT, 1),
        # Pieces that are gathered, over all shards or over some; and that are not.
        (EIGHT, (ALL,), (ALL,), EIGHT, 8),
        ((0, 1) * 4, (PAIRS, FOURS), (PAIRS,), EIGHT, 8),
        (EIGHT, (ALL,), (), EIGHT, 1),
        # Pairs that see the same data are one shard, whether they hold the same or pieces.
        (WHOLE, (ALL,), (), PAIRED, 4),
        ((0, 1) * 4, (FOURS, PAIRS), (), PAIRED, 4),
        (EIGHT, (FOURS, PAIRS), (FOURS,), PAIRED, 4),
    ],
)
def test_shards_by_hand(pieces: Any, joining: Any, gathering: Any, data: Any, expected: int):
    assert shards(pieces, joining, gathering, data) == expected


def test_joined_devices_by_hand():
    joined = [joined_devices(each, 8) for each in ([], [PAIRS], [PAIRS] * 2, [FOURS])]
    assert [*joined, joined_devices([FOURS, PAIRS], 8)] == [1, 2, 2, 4, 8]
