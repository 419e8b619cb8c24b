"""Preprocess: an Optax transformation of each shard's local gradient, before it is reduced."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import optax

from crossshard import _check
from crossshard._annotations import Given
from crossshard.errors import ArgumentError
from crossshard.gradients.status import inside_optimizer
from crossshard.pipeline.stage import Gradients, Phase, Stage, StageContext, Staged
from crossshard.pipeline.update.optimize import check_transformation
from crossshard.shards.cut import PER_SHARD, REPLICATED
from crossshard.shards.random_streams import is_key, own_stream

# The values that attributes of a user's own stage may have, and the words for them in an error.
_OF_STAGES: dict[str, tuple[tuple[Any, ...], str]] = {
    "placement": ((REPLICATED, PER_SHARD), "pipeline.REPLICATED or pipeline.PER_SHARD"),
    "phase": ((Phase.LOCAL, Phase.ARRIVAL), "Phase.LOCAL or Phase.ARRIVAL, before the sum"),
    "state_field": (("preprocess", ""), "'preprocess', or '' without a state"),
}


@dataclasses.dataclass(frozen=True)
class Preprocess(Stage):
    """An Optax transformation as a stage, with a state per shard."""

    transformation: optax.GradientTransformationExtraArgs
    name: str

    placement = PER_SHARD

    @classmethod
    def from_options(cls, options: Mapping[str, Given]) -> Stage | None:
        """Return the transformation as a stage, or the user's own stage; ``None`` without one.

        Raises:
          ArgumentError: the stage has attributes that a user's own stage cannot have.
          ArgumentTypeError: neither an Optax transformation nor a stage.
        """
        preprocess = options.get("preprocess")
        if preprocess is None:
            return None
        if isinstance(preprocess, Stage):
            for name, (among, words) in _OF_STAGES.items():
                given = getattr(preprocess, name)
                if type(given) not in map(type, among) or given not in among:
                    raise ArgumentError(
                        f"{type(preprocess).__name__}.{name} must be {words}; got "
                        f"{_check.shown(given)}."
                    )
            return preprocess
        transformation = check_transformation(preprocess, "preprocess")
        return cls(optax.with_extra_args_support(transformation), maker_of(transformation))

    def init(self, params: Any) -> Any:
        with inside_optimizer():
            return self.transformation.init(params)

    def update(self, gradients: Gradients, state: Any, context: StageContext) -> Staged:
        """Return the transformed gradients, and the transformation's next state."""
        shards = context.shards

        def own(x: Any) -> Any:
            x = shards.as_varying(x)
            # With the same key, every shard would draw the same numbers.
            return own_stream(x, shards.index()) if is_key(x) and shards.axes else x

        state = jax.tree.map(own, state)
        params = jax.tree.map(shards.as_varying, context.params)
        with inside_optimizer():
            values, after = self.transformation.update(
                gradients.values, state, params, **context.extra_args
            )
        if jax.tree.structure(after) == jax.tree.structure(state):
            # Given wider gradients, Optax returns a wider state.
            one = lambda new, old: new if new.dtype == old.dtype else new.astype(old.dtype)
            after = jax.tree.map(one, after, state)
        return gradients.replace(values=values), after

    def describe(self) -> str:
        return f"preprocess ({self.name})"


def maker_of(transformation: optax.GradientTransformation) -> str:
    """Return the name of the function that makes a transformation."""
    name = getattr(transformation.update, "__qualname__", type(transformation).__name__)
    return name.split(".")[0]
