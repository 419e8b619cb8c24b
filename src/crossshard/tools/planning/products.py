"""The matrix products and convolutions of one device, counted from a traced step."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from crossshard import _jax


@dataclasses.dataclass(frozen=True)
class Product:
    """A matrix product or convolution on one device.

    Attributes:
      flops: of one run; a multiplication and an addition are two.
      dtype: of the first operand, by JAX's name.
      times: how often it runs in one step.
    """

    flops: float
    dtype: str
    times: int


def products(jaxpr: Any, devices: int) -> Iterator[Product]:
    """The products of a jaxpr on each of so many devices, with loops counted as they run.

    The compiler's own analysis counts the body of a loop once. Outside of a ``shard_map``, work on
    global arrays is taken to be split evenly. A loop of unknown length counts once, and of a branch
    the one with the most.

    >>> import jax, jax.numpy as jnp
    >>> traced = jax.make_jaxpr(lambda a, b: a @ b)(jnp.ones((2, 3)), jnp.ones((3, 5)))
    >>> [each.flops for each in products(traced, 1)]
    [60.0]
    """
    yield from _in(_jax.opened(jaxpr), devices, 1)


def _in(jaxpr: Any, devices: int, times: int) -> Iterator[Product]:
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name in ("dot_general", "conv_general_dilated"):
            flops = _dot(equation) if name == "dot_general" else _convolution(equation)
            yield Product(flops / devices, str(equation.invars[0].aval.dtype), times)
        elif name == "shard_map":
            inner = math.prod(_jax.manual_sizes(equation))
            yield from _in(_jax.opened(equation.params["jaxpr"]), max(1, devices // inner), times)
        elif name == "cond":
            of_branches = [
                list(_in(_jax.opened(each), devices, times)) for each in equation.params["branches"]
            ]
            yield from max(of_branches, key=lambda found: sum(p.flops * p.times for p in found))
        else:
            often = equation.params["length"] if name == "scan" else 1
            for inner in _jax.jaxprs_within(equation):
                yield from _in(_jax.opened(inner), devices, times * often)


def _dot(equation: Any) -> float:
    (contracted, _), _ = equation.params["dimension_numbers"]
    left = equation.invars[0].aval.shape
    return 2.0 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[i] for i in contracted)


def _convolution(equation: Any) -> float:
    kernel = equation.invars[1].aval.shape
    features = kernel[equation.params["dimension_numbers"].rhs_spec[0]]
    return 2.0 * math.prod(equation.outvars[0].aval.shape) * math.prod(kernel) / features
