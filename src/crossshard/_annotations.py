"""Names for annotations: what a type checker can say no more of, and what many functions take."""

from collections.abc import Callable, Sequence
from types import EllipsisType
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.typing import ArrayLike

# Nested containers, of any kind that JAX knows, with leaves of any kind: JAX has no narrower type.
PyTree: TypeAlias = Any
# What a user passes as an option, before it is checked.
Given: TypeAlias = Any
# What json.dumps takes, and json.loads returns.
Json: TypeAlias = Any
# A scalar, or a scalar with what the loss returns besides: aux, model state, or both.
Loss: TypeAlias = ArrayLike | tuple[ArrayLike, PyTree]
# A PRNG key, typed or raw, or a seed.
Key: TypeAlias = jax.Array | np.ndarray | int
# Groups of shards.
Groups: TypeAlias = list[list[int]]
# What NNX filters by, or a function of path and leaf.
Filter: TypeAlias = type | str | bool | EllipsisType | Callable[..., bool] | Sequence[object]
