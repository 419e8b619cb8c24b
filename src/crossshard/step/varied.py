"""Varied: the other numbers with which a loss is compared where the first batch hides something."""

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from crossshard._check import is_inexact
from crossshard.gradients.mean import Mean
from crossshard.jaxprs.walk import equations_of, sources, sources_of
from crossshard.jaxprs.widen import COMPARES
from crossshard.model.state import TrainState
from crossshard.shards.batch_axes import join, take_rows
from crossshard.shards.random_streams import quick_key
from crossshard.step.losses.loss import StepLoss

# With how many batches a loss is compared where the first hides what later ones show: with the rows
# in another order, and as many with copies of one row in each piece; two have the same in all.
VARIED, _TURNS = 4, 10
_TIMES = 3, 10, 30  # so many times as large parameters are tried
# Yields a state and a batch, given whole numbers; and again, for a loss that is not finite.
Turn = Callable[[Any], Iterator[tuple[Any, Any]]]
_NUMBERS = 16  # how many of the whole numbers that a loss compares others with are tried


def varied(
    loss: StepLoss, shards: int, state: TrainState, batch: Any, *, smaller: bool, where: Any
) -> tuple[Sequence[Turn], Sequence[Turn], list[str]]:
    """Return turns, each of which yields a state and a batch with other numbers; and their names.

    The second turns have larger parameters, or parameters of the other sign: training carries a
    loss over a bound that it starts below. They are separate, since units that are saturated then
    hide what others show.

    If the loss is not finite, a turn goes on with fewer other numbers: first entries from -1 to 1
    stay, such as the probabilities that a logarithm needs, then others one by one, and then all.
    Later on all signs stay, and what is not alike where no row decides. A turn is given the whole
    numbers of ``compared_with``, and puts some of them in the place of others.

    First the rows change places, so that shards have others. Then each piece has copies of one row,
    as if the rows were sorted by class: where all pieces look alike, nothing shows what happens
    only to many rows of one kind, such as those beyond an expert's capacity. Once all flags of the
    first piece are set, and few of the others. At last all pieces have the same rows, as with ids
    that are there twice, which a loss may count once. In every other one of these turns all tokens
    of a row are alike.

    Args:
      loss: the loss.
      shards: the number of shards.
      state: the state of the first call.
      batch: its batch.
      smaller: whether floats of rows only become smaller: where rows end a loop, it may not end for
        larger ones.
      where: the sharding of an array that all devices have.
    """
    rows, whole = loss.split(batch)
    axes = jax.tree.leaves(loss.batch_axes.tree_of(rows))
    parts = rows, state.params, whole, state.model_state
    paths, tree = jax.tree_util.tree_flatten_with_path(parts)
    leaves = [x for _, x in paths]
    is_number = lambda x: x.size and (x.dtype == bool or jnp.issubdtype(x.dtype, jnp.number))
    places = [place for place, x in enumerate(leaves) if is_number(x)]
    looks = lambda x: (x.min(), x.max(), (x == jnp.round(x)).all() if is_inexact(x) else True)
    look = jax.jit(lambda xs: list(map(looks, xs)), out_shardings=where)
    draws, flags, small, whole_numbers = dict[int, _Draw](), set[int](), set[int](), set[int]()
    large, signs, gates, unlike = set[int](), set[int](), set[int](), set[int]()
    counting = _counting(loss, rows, whole)
    seen = jax.device_get(look([leaves[place] for place in places]))
    for place, (low, high, counts) in zip(places, seen, strict=True):
        part, exact = paths[place][0][0].idx, is_inexact(leaves[place])
        draw = _draw_of(part, low, high, exact=exact, counts=counts, smaller=smaller)
        draws |= {} if draw is None else {place: draw}
        large |= {place} if part == _PARAMS and exact and low < high and not smaller else set()
        flags |= {place} if counts and low >= 0 and high <= 1 else set()
        small |= {place} if draw is not None and low >= -1 and high <= 1 else set()
        is_whole = part == _ROWS and jnp.issubdtype(leaves[place].dtype, jnp.integer)
        # What counts rows is above 0, and what is all 1 may be a mask.
        is_mask = place in flags and (low == high or place in counting)
        whole_numbers |= {place} if is_whole and not is_mask else set()
        has_sign = part == _ROWS and exact and not smaller and place not in flags | counting
        signs |= {place} if has_sign else set()
        gates |= {place} if part == _PARAMS and exact and not smaller else set()
        unlike |= {place} if draw is _rolled else set()
    number, pieces = leaves[0].shape[axes[0]], shards * loss.pieces(shards)

    def drawn(turn: Any, given: dict[int, Any], stays: Any, known: Any) -> dict[int, Any]:
        keys = jax.random.split(quick_key(turn), (len(leaves) + 1, 4))
        of_rows = keys[-1, 0]
        order = jax.random.permutation(of_rows, number)
        copies = order[jnp.arange(number) * pieces // number]
        same = order[jnp.arange(number) % (number // pieces)]
        order = jnp.where(turn < VARIED, order, jnp.where(turn < 2 * VARIED, copies, same))
        one_token = (turn > VARIED) & (turn % 2 == 1)
        found = dict(given)
        flips = (turn < 2 * VARIED) & (turn % VARIED == 1) & ~stays[-1]
        for place, draw in draws.items():
            x = given[place]
            other = draw(keys[place, 0], x, turn)
            sign = jax.random.rademacher(keys[place, 1], x.shape) if place in signs else 1
            other = jnp.where(flips, other * sign, other).astype(x.dtype)
            found[place] = jnp.where(stays[place], x, other)
        for place in whole_numbers if len(known) else ():
            x = found[place]
            some = jax.random.bernoulli(keys[place, 2], 0.5, x.shape)
            some &= (turn % 2 == 1) & ~stays[place]
            others = known[_below(len(known), keys[place, 3], x.shape)].astype(x.dtype)
            found[place] = jnp.where(some, others, x)
        for place, axis in enumerate(axes):
            x = found[place] = take_rows(found[place], axis, order)
            if place in flags:
                full = jnp.expand_dims(jnp.arange(number) < number // pieces, [*range(1, x.ndim)])
                often = jnp.where(jnp.moveaxis(full, 0, axis), 1.0, 0.1)
                some = jax.random.bernoulli(keys[place, 0], often, x.shape).astype(x.dtype)
                found[place] = jnp.where((turn == 2) & ~stays[place], some, x)
            else:
                found[place] = _of_one_token(one_token, of_rows, x, axis)
        return found

    given = {place: leaves[place] for place in {*range(len(axes)), *draws}}
    run = jax.jit(drawn, out_shardings={place: x.sharding for place, x in given.items()})
    of_rows = {place for place in {*draws, *flags, *whole_numbers} if place < len(axes)}
    small &= of_rows - flags - whole_numbers
    fewer = [
        set[int](),
        small,
        *({*small, place} for place in of_rows),
        of_rows,
        of_rows | {*draws},
    ]

    def scaled(times: Any, flips: Any, xs: dict[int, Any]) -> dict[int, Any]:
        found = dict[int, Any]()
        for place, x in xs.items():
            some = jax.random.rademacher(quick_key(place), x.shape)
            sign = jnp.where(times == _TIMES[0], -1, jnp.where(times == _TIMES[1], some, 1))
            by = jnp.where(flips, sign, 1) * (times if place in large else 1)
            found[place] = (x * by).astype(x.dtype)
        return found

    larger = jax.jit(scaled, out_shardings={place: leaves[place].sharding for place in gates})

    def of_turn(turn: int, times: int, known: Any) -> Iterator[tuple[Any, Any]]:
        # The place behind all is that of the signs.
        later = [each | unlike | {len(leaves)} for each in fewer]
        for stays in [*fewer[: -1 if turn % VARIED == 1 else 1], *later]:
            numbers = run(turn, given, np.isin(np.arange(len(leaves) + 1), [*stays]), known)
            if times > 1:
                xs = {place: numbers.get(place, leaves[place]) for place in gates}
                numbers |= larger(times, len(leaves) not in stays, xs)
            rows, params, whole, model_state = tree.unflatten(
                [numbers.get(place, x) for place, x in enumerate(leaves)]
            )
            after = dataclasses.replace(state, params=params, model_state=model_state)
            yield after, join(rows, whole)

    path_of = lambda path: f"batch{jax.tree_util.keystr(path[1:])}"
    name_of = lambda path: _NAMES.get(path[0].idx) or path_of(path)
    turns = [functools.partial(of_turn, turn, 1) for turn in range(_TURNS)]
    # Of rows in another order, and of copies of one in each piece, which are further apart.
    of_larger = [
        functools.partial(of_turn, turn, times) for times in _TIMES for turn in (0, VARIED)
    ]
    names = dict.fromkeys(name_of(paths[place][0]) for place in sorted({*draws, *of_rows}))
    return turns, of_larger if gates else [], list(names)


def _counting(loss: StepLoss, rows: Any, whole: Any) -> set[int]:
    """Return the places of the arrays with rows that a weight, or a ``Mean``, counts rows with."""
    weight, read = loss.weight_fn, list[int]()
    if weight is not None:
        read += sources(lambda rows: weight(join(rows, whole)), rows)
    for jaxpr, tree in loss.record.traces.values():
        returned = jax.tree.unflatten(tree, sources_of(jaxpr)).loss
        read += [each.count for each in returned.terms] if isinstance(returned, Mean) else []
    bits = functools.reduce(operator.or_, read, 0)
    return {place for place in range(len(jax.tree.leaves(rows))) if bits >> place & 1}


def compared_with(jaxpr: Any) -> np.ndarray[Any, Any]:
    """Return the whole numbers that a jaxpr compares others with.

    They are literals, with their neighbours, and the numbers of an iota, as ``jax.nn.one_hot`` has
    them.
    """
    made_by = {id(out): each for each in equations_of(jaxpr) for out in each.outvars}
    comparisons = [each for each in equations_of(jaxpr) if each.primitive.name in COMPARES]
    atoms = [atom for each in comparisons for atom in each.invars]
    values = [np.asarray(atom.val) for atom in atoms if isinstance(atom, Literal)]
    found = {int(x) for x in values if x.ndim == 0 and x.dtype.kind in "iu" and abs(x) < 2**30}
    classes = set[int]()
    for made in (made_by.get(id(atom)) for atom in atoms):
        while made is not None and made.primitive.name in ("broadcast_in_dim", "reshape"):
            made = made_by.get(id(made.invars[0]))
        if made is not None and made.primitive.name == "iota":
            end = made.params["shape"][made.params["dimension"]]
            step = max(1, -(-end // _NUMBERS))
            classes |= {*range(end - 1, -1, -step)}
    near = {x + by for x in sorted(found)[:_NUMBERS] for by in (0, -1, 1)}
    # What is beyond the classes may be NaN.
    return np.array([*sorted(near), *sorted(classes - near)[:_NUMBERS]], np.int32)


# The parts of what is varied, and the names of two of them.
_ROWS, _PARAMS, _WHOLE, _STATE = range(4)
_NAMES = {_PARAMS: "params", _STATE: "model_state"}
# From a random key, an array and the turn to an array.
_Draw = Callable[[Any, Any, Any], Any]


def _draw_of(
    part: int, low: Any, high: Any, *, exact: bool, counts: bool, smaller: bool
) -> _Draw | None:
    """Return what draws other numbers for an array; ``None`` if it stays as it is.

    Of ones, as in a mask of a batch without padding, some become 0, and of zeros that are no floats
    some become 1. Floats that are all alike, as rewards that nobody has reached yet, become random;
    and so do parameters, as of a layer that starts at 0, or a gate. What is all alike in the model
    state, in entries without rows and in columns of counts, becomes smaller and larger: a counter
    of steps, or the weight of a term that starts later; what is not alike there changes places, as
    the weights of terms. Other floats of a batch become larger and smaller, each by its own factor,
    as outliers are; if all are integers, as of a mask, by one factor.

    Args:
      part: the part that the array is in.
      low: its smallest number.
      high: its largest.
      exact: whether they are floats.
      counts: whether all of them are integers.
      smaller: as of ``varied``.
    """
    alike = low == high
    if part == _PARAMS:
        return functools.partial(_nearby, 0.1) if exact and alike else None
    if part != _ROWS and not alike:
        return None if smaller else _rolled
    if part in (_WHOLE, _STATE):
        return _later
    if not alike and counts:
        return _tens if exact and not smaller else None
    if not alike:
        return functools.partial(_with_outliers, smaller)
    if low == 1 or (low == 0 and not exact):
        return functools.partial(_some_ones, 0.8 if low else 0.2)
    return functools.partial(_nearby, 1) if exact else _later


# What becomes of an array in each of twice ``VARIED`` turns.


def _some_ones(often: float, key: Any, x: Any, turn: Any) -> Any:
    """Return ones and zeros; once in ``VARIED`` turns tens, as a column of epochs may have."""
    found = jax.random.bernoulli(key, often, x.shape)
    return found if x.dtype == bool else found * jnp.where(_is_last(turn), 10, 1)


def _tens(key: Any, x: Any, turn: Any) -> Any:
    """Return ten times an array once in ``VARIED`` turns, of whose numbers a bound hides others."""
    del key
    return x * jnp.where(_is_last(turn), 10, 1)


def _nearby(size: float, key: Any, x: Any, turn: Any) -> Any:
    """Return random numbers around those of an array; a single one, as of a gate, up and down.

    It does not only move by whole numbers: it may be a share, such as that of the rows to keep.
    """
    if x.size == 1:
        by = turn % VARIED * jnp.where(turn % 2, 1, -1) * jnp.maximum(jnp.abs(x), 1)
        return x + by * jnp.where((turn > VARIED) & (turn < 2 * VARIED - 1), 1 / 3, 1)
    found = x + size * jax.random.normal(key, x.shape)
    return found if size < 1 else found * jnp.where(_is_last(turn), 10, 1)


def _later(key: Any, x: Any, turn: Any) -> Any:
    """Return an array of equal numbers as it may be in other steps: smaller at first, then larger.

    A count becomes 0 or -1, and large; zeros that are floats become positive.
    """
    nth, again = turn % VARIED, turn > VARIED
    if x.dtype == bool:
        return jnp.where(nth > 1, ~x, x)
    if not is_inexact(x):
        few, many = jnp.where(again, -1, 0), jnp.maximum(8 * x, 10**nth)
        return jnp.where(nth == 0, x, jnp.where(nth == 1, few, many))
    positive = jnp.where(nth > 1, jnp.abs(jax.random.normal(key, x.shape)), 0)
    few, many = jnp.where(again, -1.0, 0.1), 10.0 ** (2 * nth - 3)
    times = jnp.where(nth == 0, 1.0, jnp.where(nth == 1, few, many))
    return jnp.where(x == 0, positive, x * times)


def _with_outliers(smaller: bool, key: Any, x: Any, turn: Any) -> Any:
    size = turn % VARIED * jax.random.normal(key, x.shape)
    return x * jnp.exp(-jnp.abs(size) if smaller else size)


def _rolled(key: Any, x: Any, turn: Any) -> Any:
    """Return entries in other places, and 1 for 0, once in ``VARIED`` turns."""
    del key
    other = jnp.where(x == 0, 1, jnp.roll(x, 1 + turn // VARIED))
    return jnp.where(_is_last(turn), other, x)


def _is_last(turn: Any) -> Any:
    return turn % VARIED == VARIED - 1


def _of_one_token(is_set: Any, key: Any, x: Any, axis: int) -> Any:
    """Return rows whose tokens are all that of one place, if that is set."""
    if x.ndim < 2 or not x.size:
        return x
    along = int(axis == 0)
    place = _below(x.shape[along], key, (1,))
    return jnp.where(is_set, jnp.take(x, place, along), x)


def _below(end: int, key: Any, shape: tuple[int, ...]) -> jax.Array:
    """Return random integers from 0 to ``end``, without it; ``jax.random`` would draw twice."""
    return jax.random.bits(key, shape) % jnp.uint32(end)
