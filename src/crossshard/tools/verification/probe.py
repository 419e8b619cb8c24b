"""The optimizer of a verification: plain SGD, which rests until it is given a learning rate."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

# Of no float32 that is a learning rate, and of no counter that a step has: how the state is known.
_IDLE = -1_234_567_891


class ProbeState(NamedTuple):
    """The learning rate, as an integer, which no cast of a state to fewer bits changes."""

    bits: jax.Array  # int32[], those of a float32


def probe() -> optax.GradientTransformationExtraArgs:
    """Plain SGD, which changes nothing before its state has a learning rate.

    What an idle step changes is no parameter, but statistics, counters and the like, on which the
    next step may depend. However often a step updates, or how seldom, none of it moves parameters.

    >>> import jax, jax.numpy as jnp
    >>> sgd = probe()
    >>> state = sgd.init(jnp.float32(1))
    >>> moving = jax.tree.map(lambda x: with_rate(x, 2.0), state)
    >>> float(sgd.update(jnp.float32(3), state)[0]), float(sgd.update(jnp.float32(3), moving)[0])
    (0.0, -6.0)
    """

    def init(params: optax.Params) -> ProbeState:
        del params
        return ProbeState(jnp.int32(_IDLE))

    def update(
        updates: optax.Updates, state: ProbeState, params: optax.Params = None, **extra: object
    ) -> tuple[optax.Updates, ProbeState]:
        del params, extra
        rate = jax.lax.bitcast_convert_type(state.bits, jnp.float32)
        rests = state.bits == _IDLE
        step = lambda g: jnp.where(rests, 0, -rate * g).astype(g.dtype)
        return jax.tree.map(step, updates), state

    return optax.GradientTransformationExtraArgs(init, update)


def with_rate(x: Any, rate: float) -> Any:
    """An array of a state, in which a learning rate stands where the probe rests.

    Args:
      x: the array, of any kind; others than the probe's stay as they are.
      rate: the learning rate; it must be positive.
    """
    if getattr(x, "dtype", None) != np.int32:
        return x
    bits = np.float32(rate).view(np.int32)
    given = lambda piece: np.where(np.asarray(piece) == _IDLE, bits, np.asarray(piece))
    if not isinstance(x, jax.Array):
        return given(x)
    if not x.committed:
        return jnp.asarray(given(x))
    pieces = [jax.device_put(given(each.data), each.device) for each in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, pieces)
