"""Type aliases that the annotations of many functions share."""

from collections.abc import Callable, Sequence
from types import EllipsisType
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.typing import ArrayLike

# A pytree with leaves of any kind: JAX has no narrower type.
PyTree: TypeAlias = Any
# An option as the user passed it, before it is checked.
Given: TypeAlias = Any
# A value that json.dumps takes and json.loads returns.
Json: TypeAlias = Any
# A scalar, or a scalar with the other results of a loss: aux, model state, or both.
Loss: TypeAlias = ArrayLike | tuple[ArrayLike, PyTree]
# A PRNG key, typed or raw, or a seed.
Key: TypeAlias = jax.Array | np.ndarray | int
# Groups of shards.
Groups: TypeAlias = list[list[int]]
# An NNX filter, or a function of path and leaf.
Filter: TypeAlias = type | str | bool | EllipsisType | Callable[..., bool] | Sequence[object]
