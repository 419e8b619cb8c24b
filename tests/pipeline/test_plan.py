"""How an update is planned."""

from typing import Any

import jax
import numpy as np
import optax

from crossshard.pipeline.plan import UpdateStrategy, WeightUpdate, plan_update


def test_an_update_is_traced_once_on_whole_arrays_and_once_on_slices():
    seen: list[tuple[int, ...]] = []

    def update(gradients: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
        del params, extra_args
        seen.append(gradients.shape)
        return -gradients, state

    optimizer = optax.GradientTransformationExtraArgs(lambda params: (), update)
    params = jax.ShapeDtypeStruct((64, 64), np.float32)
    plan = plan_update(optimizer, params, 8, WeightUpdate.SHARDED)
    assert plan.strategy is UpdateStrategy.PARTS
    assert seen == [(64, 64), (8, 64)]
