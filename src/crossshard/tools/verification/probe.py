"""The optimizer of a verification: plain SGD, whose first step changes nothing."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax


class ProbeState(NamedTuple):
    """How many steps were taken."""

    number: jax.Array  # int32[]


def probe(learning_rate: float) -> optax.GradientTransformationExtraArgs:
    """Plain SGD, with a learning rate of 0 in its first step.

    What that idle step changes is no parameter, but statistics, counters and the like, on which
    the next step may depend. So all numbers of shards are compared on their second step.

    >>> import jax.numpy as jnp
    >>> sgd = probe(2.0)
    >>> first, state = sgd.update(jnp.float32(3), sgd.init(jnp.float32(1)))
    >>> float(first), float(sgd.update(jnp.float32(3), state)[0])
    (0.0, -6.0)
    """

    def init(params: optax.Params) -> ProbeState:
        del params
        return ProbeState(jnp.zeros((), jnp.int32))

    def update(
        updates: optax.Updates, state: ProbeState, params: optax.Params = None, **extra: object
    ) -> tuple[optax.Updates, ProbeState]:
        del params, extra
        moves = state.number > 0
        step = lambda g: jnp.where(moves, -learning_rate * g, 0).astype(g.dtype)
        return jax.tree.map(step, updates), ProbeState(state.number + 1)

    return optax.GradientTransformationExtraArgs(init, update)
