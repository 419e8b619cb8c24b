"""Whether an update is elementwise, read from its own trace: then each shard can do its part alone.

The update is traced twice, on whole arrays and on parts of them, and both traces are followed side
by side. It is elementwise if both do the same, and if every element that comes out depends on
elements at the same place, and on what all shards have in common.
"""

import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from crossshard import _jax

# One element out for one element in at the same place; operands may also be scalars.
_ELEMENTWISE = frozenset(
    "abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil "
    "clamp clz complex conj convert_element_type copy copy_p cos cosh digamma div eq erf erf_inv "
    "erfc exp exp2 expm1 floor ge gt igamma igammac imag integer_pow is_finite le lgamma log log1p "
    "logistic lt max min mul ne neg nextafter not or polygamma population_count pow real "
    "reduce_precision regularized_incomplete_beta rem round rsqrt select_n shift_left "
    "shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient sub tan "
    "tanh xor".split()
)
# Parameters of equations that speak of shapes or of where a value lies, not of what is computed.
_OF_SHAPE = frozenset({"shape", "sharding", "broadcast_dimensions", "out_sharding"})


class _Kind(enum.Enum):
    SAME = "the same on all shards"
    UNIFORM = "one number at every place"
    PART = "each place its own"


@dataclasses.dataclass(frozen=True)
class _Mixed:
    """A value whose elements depend on those of other places, or on the places.

    Attributes:
      reason: what mixes them.
      source: the line it comes from; empty if that is not known.
    """

    reason: str
    source: str = ""

    def __str__(self) -> str:
        return f"{self.reason} ({self.source})" if self.source else self.reason


Kind = _Kind | _Mixed


class _Unlike(Exception):
    """The two traces do not do the same; no value of one can be told from the other."""


def obstacle_to_parts(
    update: Callable[..., tuple[Any, Any]], wholes: tuple[Any, ...], parts: tuple[Any, ...]
) -> str | None:
    """Why an update cannot be run on parts; ``None`` if it can.

    Args:
      update: from ``(params, state, …)`` to the new ``(params, state)``.
      wholes: its arguments, pytrees with shapes and dtypes.
      parts: the same as one shard would have them; leaves of equal shape are had by all shards.

    Returns:
      A reason in a few words, with the line of source it comes from.
    """
    whole = jax.make_jaxpr(update)(*wholes)
    try:
        part = jax.make_jaxpr(update)(*parts)
    except Exception as error:  # a rule may refuse what is no whole in any way
        return str(_Mixed("it cannot be run on parts", _jax.source_of_error(error)))
    try:
        return _obstacle(whole, part, jax.tree.leaves(parts[:2]))
    except _Unlike as unlike:
        return str(unlike)


def _obstacle(whole: Any, part: Any, expected: Sequence[Any]) -> str | None:
    inputs = [
        _Kind.SAME if one.aval.shape == own.aval.shape else _Kind.PART
        for one, own in _pairs(whole.jaxpr.invars, part.jaxpr.invars)
    ]
    outputs = _follow(whole, part, inputs)
    if len(outputs) != len(expected):
        return "its state changes its structure"
    for kind, before, own, was in zip(outputs, expected, part.jaxpr.outvars, inputs, strict=False):
        if isinstance(kind, _Mixed):
            return str(kind)
        if own.aval.shape != before.shape or (kind is _Kind.SAME) != (was is _Kind.SAME):
            return "what comes out lies otherwise than what goes in"
    return None


def _pairs(wholes: Sequence[Any], parts: Sequence[Any]) -> list[tuple[Any, Any]]:
    if len(wholes) != len(parts):
        raise _Unlike("it does something else on parts")
    return list(zip(wholes, parts, strict=True))


def _follow(whole: Any, part: Any, inputs: Sequence[Kind]) -> list[Kind]:
    """The kinds of the outputs of a pair of jaxprs, given those of their inputs."""
    constants = _jax.constants(whole), _jax.constants(part)
    whole, part = _jax.opened(whole), _jax.opened(part)
    known: dict[Any, Kind] = {}
    for variable, value, own in zip(whole.constvars, *constants, strict=False):
        same = np.shape(value) == np.shape(own) and bool(np.all(np.asarray(value) == own))
        known[variable] = _Kind.SAME if same else _Mixed("a constant of the size of a parameter")
    known.update(zip(whole.invars, inputs, strict=True))

    def kind_of(atom: Any, own: Any, source: str = "") -> Kind:
        if not hasattr(atom, "val"):
            return known[atom]
        if not hasattr(own, "val") or not np.array_equal(atom.val, own.val, equal_nan=True):
            raise _Unlike(str(_Mixed("it computes with the shape of a parameter", source)))
        return _Kind.SAME

    for equation, own in _pairs(whole.eqns, part.eqns):
        if equation.primitive is not own.primitive:
            raise _Unlike(str(_Mixed("it does something else on parts", _jax.source_of(equation))))
        source = _jax.source_of(equation)
        kinds = [kind_of(*pair, source) for pair in _pairs(equation.invars, own.invars)]
        outputs = _of_equation(equation, own, kinds)
        known.update(zip(equation.outvars, outputs, strict=True))
    return [kind_of(*pair) for pair in _pairs(whole.outvars, part.outvars)]


def _of_equation(equation: Any, own: Any, kinds: list[Kind]) -> list[Kind]:
    name = equation.primitive.name
    if name == "cond":
        return _of_cond(equation, own, kinds)
    if name == "while":
        return _of_while(equation, own, kinds)
    if name == "scan":
        return _of_scan(equation, own, kinds)
    if name == "optimization_barrier":
        return kinds
    inner = _jax.called(equation), _jax.called(own)
    if None not in inner:
        return [_placed(kind, equation) for kind in _follow(*inner, kinds)]
    mixed = [kind for kind in kinds if isinstance(kind, _Mixed)]
    if mixed:
        return [mixed[0]] * len(equation.outvars)
    if not equation.outvars:  # such as a print
        return []
    out, alike = equation.outvars[0].aval.shape, _alike(equation.params, own.params)
    shapes_agree = all(
        one.aval.shape == other.aval.shape
        for one, other in zip(equation.outvars, own.outvars, strict=True)
    )
    if all(kind is _Kind.SAME for kind in kinds):
        if alike and shapes_agree:
            return [_Kind.SAME] * len(equation.outvars)
        if name == "broadcast_in_dim" and equation.invars[0].aval.shape == ():
            return [_Kind.UNIFORM]
        return [
            _Mixed(f"{name} makes an array of the size of a parameter", _jax.source_of(equation))
        ]
    in_place = all(
        atom.aval.shape == out or (kind is _Kind.SAME and atom.aval.shape == ())
        for atom, kind in zip(equation.invars, kinds, strict=True)
    )
    reorders = equation.params.get("dimensions") is not None
    moves_nothing = name in ("broadcast_in_dim", "reshape") and len(kinds) == 1 and not reorders
    if ((name in _ELEMENTWISE and alike) or moves_nothing) and in_place:
        return [_Kind.PART if _Kind.PART in kinds else _Kind.UNIFORM] * len(equation.outvars)
    mixes = _Mixed(f"{name} over a whole parameter", _jax.source_of(equation))
    return [mixes] * len(equation.outvars)


def _of_cond(equation: Any, own: Any, kinds: list[Kind]) -> list[Kind]:
    if kinds[0] is not _Kind.SAME:
        return [_Mixed("a branch on a part", _jax.source_of(equation))] * len(equation.outvars)
    branches = _pairs(equation.params["branches"], own.params["branches"])
    return _joined([_follow(*pair, kinds[1:]) for pair in branches])


def _of_while(equation: Any, own: Any, kinds: list[Kind]) -> list[Kind]:
    test, body = equation.params["cond_nconsts"], equation.params["body_nconsts"]
    of_test, of_body, carry = kinds[:test], kinds[test : test + body], kinds[test + body :]
    while True:
        pair = equation.params["cond_jaxpr"], own.params["cond_jaxpr"]
        (going_on,) = _follow(*pair, [*of_test, *carry])
        if going_on is not _Kind.SAME:
            return [_Mixed("a loop that ends by a part", _jax.source_of(equation))] * len(carry)
        pair = equation.params["body_jaxpr"], own.params["body_jaxpr"]
        after = _joined([carry, _follow(*pair, [*of_body, *carry])])
        if after == carry:
            return carry
        carry = after


def _of_scan(equation: Any, own: Any, kinds: list[Kind]) -> list[Kind]:
    constants, carried = _jax.scan_parts(equation.params)
    carry, scanned = kinds[constants : constants + carried], kinds[constants + carried :]
    over_parts = _Mixed("a scan over a part", _jax.source_of(equation))
    if any(equation.params[key] != own.params[key] for key in ("length", "reverse")):
        return [over_parts] * len(equation.outvars)
    rows = [kind if kind is _Kind.SAME else over_parts for kind in scanned]
    while True:
        pair = equation.params["jaxpr"], own.params["jaxpr"]
        outputs = _follow(*pair, [*kinds[:constants], *carry, *rows])
        after = _joined([carry, outputs[:carried]])
        if after == carry:
            stacked = [kind if kind is _Kind.SAME else over_parts for kind in outputs[carried:]]
            return [*carry, *stacked]
        carry = after


def _joined(alternatives: Sequence[Sequence[Kind]]) -> list[Kind]:
    """What each value is, if it may come from any of the alternatives."""
    return [_join(kinds) for kinds in zip(*alternatives, strict=True)]


def _join(kinds: Sequence[Kind]) -> Kind:
    mixed = [kind for kind in kinds if isinstance(kind, _Mixed)]
    if mixed:
        return mixed[0]
    if all(kind is kinds[0] for kind in kinds):
        return kinds[0]
    if _Kind.SAME in kinds:
        return _Mixed("a whole array in one case and a part in another")
    return _Kind.PART


def _alike(whole: dict[str, Any], part: dict[str, Any]) -> bool:
    # Both come from one function, so what they hold besides shapes compares by value.
    return all(
        key in _OF_SHAPE or whole[key] is part[key] or whole[key] == part[key] for key in whole
    )


def _placed(kind: Kind, equation: Any) -> Kind:
    """A value that comes out of a call; what has no line of its own comes from the call's."""
    if isinstance(kind, _Mixed) and not kind.source:
        return _Mixed(kind.reason, _jax.source_of(equation))
    return kind
