"""Counts the floating-point operations of the products in a jaxpr: matrices, convolutions, kernels.

A multiplication and an addition are two. Everything else is left out, as by those who count by
hand. What no rule here counts is named, so that nobody takes the rest for all.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from crossshard import _jax
from crossshard.jaxprs.kernels import DEFINED_BY_JAXPR
from crossshard.jaxprs.primitives import KNOWN
from crossshard.jaxprs.walk import Call, Cond, Scan, control_flow, jaxprs_within, opened


@dataclasses.dataclass(frozen=True)
class Products:
    """How many floating-point operations there are, and what may have more that are not counted."""

    flops: int = 0
    uncounted: frozenset[str] = frozenset()

    def __add__(self, other: "Products") -> "Products":
        return Products(self.flops + other.flops, self.uncounted | other.uncounted)

    def times(self, number: int) -> "Products":
        """Return those of as many runs."""
        return dataclasses.replace(self, flops=self.flops * number)


_NONE = Products()


def products(jaxpr: Any, *, again: bool = True) -> Products:
    """Count the products of a jaxpr: of a scan in each turn, of branches the largest.

    Args:
      jaxpr: the jaxpr, closed or open.
      again: whether to count the product that the backward pass of cuDNN's attention recomputes.

    >>> import jax, jax.numpy as jnp
    >>> products(jax.make_jaxpr(lambda x: x @ x)(jnp.ones((2, 2)))).flops
    16
    """
    return sum((_of(each, again=again) for each in opened(jaxpr).eqns), _NONE)


def _of(equation: Any, *, again: bool) -> Products:
    name, params = equation.primitive.name, equation.params
    if name in _RULES:
        return Products(2 * _RULES[name](equation, again))
    flow, inner = control_flow(equation), jaxprs_within(equation)
    each = [products(jaxpr, again=again) for jaxpr in inner]
    together = sum(each, _NONE)
    if isinstance(flow, Cond):
        return dataclasses.replace(together, flops=max(x.flops for x in each))
    if isinstance(flow, Scan):
        return together.times(params["length"])
    if name == "shard_map":
        manual = params["newly_manual_axes" if "newly_manual_axes" in params else "manual_axes"]
        return together.times(math.prod(params["mesh"].shape[axis] for axis in manual))
    is_known = isinstance(flow, Call) or name in _CALLS or (inner and together == _NONE)
    if is_known or name in _NO_PRODUCTS or not equation.outvars:
        return together
    # A kernel, or a loop that does not say how often it runs.
    estimate = getattr(params.get("cost_estimate"), "flops", None)
    if estimate is None:
        return Products(0, frozenset({f"{name} ({_jax.source_of(equation)})"}))
    return Products(int(estimate))


# Of those that no other analysis knows, these have no products.
_NO_PRODUCTS = KNOWN | frozenset(
    """
    accum_grad_in_ref add_dependency addupdate approx_top_k bitcast empty_ref freeze from_edtype get
    new_ref philox2x32 philox4x32 reciprocal relayout roll shard_alike stochastic_round swap tie
    to_edtype with_memory_space_constraint
    """.split()
)
# Their jaxprs are all that they run.
_CALLS = frozenset(("custom_partitioning", "run_state", *DEFINED_BY_JAXPR))


# How often each product multiplies.


def _dot(equation: Any, again: bool) -> int:
    (contracted, _), _ = equation.params["dimension_numbers"]
    return _contracted(equation, contracted)


def _ragged_dot(equation: Any, again: bool) -> int:
    numbers = equation.params["ragged_dot_dimension_numbers"]
    (contracted, _), _ = numbers.dot_dimension_numbers
    # The groups split what is contracted, or the rows of the output.
    groups = equation.invars[2].aval.shape[-1]
    split = set(numbers.lhs_ragged_dimensions) & set(contracted)
    return _contracted(equation, contracted) // (groups if split else 1)


def _contracted(equation: Any, dimensions: Any) -> int:
    left, out = equation.invars[0].aval, equation.outvars[0].aval
    return int(out.size * math.prod(left.shape[axis] for axis in dimensions))


def _convolution(equation: Any, again: bool) -> int:
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


_RULES: dict[str, Callable[[Any, bool], int]] = {
    "dot_general": _dot,
    "ragged_dot_general": _ragged_dot,
    "conv_general_dilated": _convolution,
    "dot_product_attention_fwd_wrapper": lambda equation, again: _attention(equation, 2),
    "dot_product_attention_bwd_wrapper": lambda equation, again: _attention(equation, 4 + again),
}
