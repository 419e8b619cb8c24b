"""Counts the floating-point operations of the products in a jaxpr: matrices, convolutions, kernels.

A multiplication and an addition are two. Everything else is left out, as by those who count by
hand. What no rule here counts is named, so that nobody takes the rest for all.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from crossshard import _jax
from crossshard.jaxprs.kernels import DEFINED_BY_JAXPR
from crossshard.jaxprs.primitives import KNOWN
from crossshard.jaxprs.walk import Call, Cond, Scan, control_flow, jaxprs_within, opened


def products(jaxpr: Any, uncounted: set[str]) -> int:
    """Count the products of a jaxpr: of a scan in each turn, of branches the largest.

    ``uncounted`` gets the names of what may have more of them.

    >>> import jax, jax.numpy as jnp
    >>> products(jax.make_jaxpr(lambda x: x @ x)(jnp.ones((2, 2))), set())
    16
    """
    return sum(_of(each, uncounted) for each in opened(jaxpr).eqns)


def _of(equation: Any, uncounted: set[str]) -> int:
    name, params = equation.primitive.name, equation.params
    if name in _RULES:
        return 2 * _RULES[name](equation)
    flow, inner, within = control_flow(equation), jaxprs_within(equation), set[str]()
    each = [products(jaxpr, within) for jaxpr in inner]
    if isinstance(flow, Call | Cond | Scan) or name in _CALLS:
        uncounted |= within
        return max(each) if isinstance(flow, Cond) else sum(each) * _turns(equation)
    has_none = inner or name in _NO_PRODUCTS or not equation.outvars
    if has_none and not (sum(each) or within):
        return 0
    # A kernel, or a loop that does not say how often it runs.
    estimate = getattr(params.get("cost_estimate"), "flops", None)
    if estimate is None:
        uncounted.add(f"{name} ({_jax.source_of(equation)})")
    return int(estimate or 0)


def _turns(equation: Any) -> int:
    """Return how often a call runs its jaxpr: in turns, or on shards."""
    params = equation.params
    if equation.primitive.name != "shard_map":
        return int(params.get("length", 1))
    manual = params["newly_manual_axes" if "newly_manual_axes" in params else "manual_axes"]
    return math.prod(params["mesh"].shape[axis] for axis in manual)


# Of those that no other analysis knows, these have no products.
_NO_PRODUCTS = KNOWN | frozenset(
    """
    accum_grad_in_ref add_dependency addupdate approx_top_k bitcast empty_ref freeze from_edtype get
    new_ref philox2x32 philox4x32 reciprocal relayout roll shard_alike stochastic_round swap tie
    to_edtype with_memory_space_constraint
    """.split()
)
# Their jaxprs are all that they run.
_CALLS = frozenset(("custom_partitioning", "run_state", "shard_map", *DEFINED_BY_JAXPR))


# How often each product multiplies.


def _dot(equation: Any) -> int:
    (contracted, _), _ = equation.params["dimension_numbers"]
    return _contracted(equation, contracted)


def _ragged_dot(equation: Any) -> int:
    numbers = equation.params["ragged_dot_dimension_numbers"]
    (contracted, _), _ = numbers.dot_dimension_numbers
    # The groups split what is contracted, or the rows of the output.
    groups = equation.invars[2].aval.shape[-1]
    split = set(numbers.lhs_ragged_dimensions) & set(contracted)
    return _contracted(equation, contracted) // (groups if split else 1)


def _contracted(equation: Any, dimensions: Any) -> int:
    left, out = equation.invars[0].aval, equation.outvars[0].aval
    return int(out.size * math.prod(left.shape[axis] for axis in dimensions))


def _convolution(equation: Any) -> int:
    """Count what is multiplied with numbers, and not with padding or the zeros of a dilation."""
    params = equation.params
    left, right, out = params["dimension_numbers"]
    x, kernel, y = (each.aval.shape for each in (*equation.invars, *equation.outvars))
    found = y[out[0]] * y[out[1]] * kernel[right[1]]
    for place, (low, _) in enumerate(params["padding"]):
        size, dilation = x[left[2 + place]], params["lhs_dilation"][place]
        starts = np.arange(y[out[2 + place]]) * params["window_strides"][place] - low
        taps = np.arange(kernel[right[2 + place]]) * params["rhs_dilation"][place]
        at = starts[:, None] + taps
        found *= int(((at >= 0) & (at <= (size - 1) * dilation) & (at % dilation == 0)).sum())
    return int(found)


def _attention(equation: Any, products: int) -> int:
    query, key = (each.aval.shape for each in equation.invars[:2])
    # As many as if nothing were masked, as where XLA computes it.
    return math.prod(query) * key[2 if equation.params["layout"] else 1] * products


_RULES: dict[str, Callable[[Any], int]] = {
    "dot_general": _dot,
    "ragged_dot_general": _ragged_dot,
    "conv_general_dilated": _convolution,
    "dot_product_attention_fwd_wrapper": lambda equation: _attention(equation, 2),
    "dot_product_attention_bwd_wrapper": lambda equation: _attention(equation, 4),
}
