"""The Optax idiom: a transformation that reduces over the shards and then updates."""

from typing import Any

import jax
import optax

from crossshard.collectives.together import gather_together
from crossshard.errors import ArgumentTypeError
from crossshard.gradients.incoming import check_incoming
from crossshard.gradients.once import only_reduction
from crossshard.gradients.pipeline import Pipeline
from crossshard.optimizer.weight_update import Plan, WeightUpdate, map_cuts, plan_update
from crossshard.shards.axes import Shards

_ROOTS_OF_OTHERS = {
    "keras": "Keras",
    "tf_keras": "Keras",
    "tensorflow": "TensorFlow",
    "torch": "PyTorch",
}
_EQUIVALENTS = {
    "adadelta": "adadelta", "adagrad": "adagrad", "adam": "adam", "adamax": "adamax",
    "adamw": "adamw", "gradientdescent": "sgd", "lamb": "lamb", "lion": "lion",
    "momentum": "sgd(lr, momentum)", "nadam": "nadam", "radam": "radam", "rmsprop": "rmsprop",
    "rprop": "rprop", "sgd": "sgd", "adafactor": "adafactor", "lbfgs": "lbfgs",
}  # fmt: skip


def cross_shard(
    inner: optax.GradientTransformation, pipeline: Pipeline, name: str, wanted: WeightUpdate
) -> optax.GradientTransformationExtraArgs:
    """``inner`` on reduced gradients; its state is the inner state and nothing else.

    Where the weight update is sharded, the state is this shard's part, and updates are gathered.
    """
    inner = optax.with_extra_args_support(inner)

    def planned(params: optax.Params, shards: Shards) -> Plan:
        number = shards.number if pipeline.groups is None else pipeline.groups.size
        return plan_update(inner, params, number, wanted, only_parts=True)

    def init(params: optax.Params) -> optax.OptState:
        state = inner.init(params)
        if wanted is WeightUpdate.REPLICATED:
            return state
        shards = pipeline.shards()
        with only_reduction():
            cuts = planned(params, shards).state
        return map_cuts(lambda cut, x: cut.own(x, shards, pipeline.groups), cuts, state)

    def update(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        *,
        incoming: str | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        with jax.named_scope(name), only_reduction():
            said = check_incoming(incoming)
            shards = pipeline.shards()
            cuts = None if wanted is WeightUpdate.REPLICATED else planned(updates, shards).params
            reduced = pipeline.reduce(updates, shards, said, cuts=cuts)
            # Optax's names for the loss and the gradient that some rules ask for besides.
            if extra_args.get("value") is not None:
                loss = pipeline.reduce_loss(extra_args["value"], shards, said)
                extra_args["value"] = loss
            if extra_args.get("grad") is not None:
                extra_args["grad"] = pipeline.reduce(extra_args["grad"], shards, said, cuts=cuts)
            if cuts is None:
                return inner.update(reduced, state, params, **extra_args)
            if params is not None:
                params = map_cuts(lambda cut, x: cut.own(x, shards, pipeline.groups), cuts, params)
            reduced, state = inner.update(reduced, state, params, **extra_args)
            parts, tree = jax.tree.flatten(reduced)
            return tree.unflatten(gather_together(parts, cuts, shards, pipeline.groups)), state

    return optax.GradientTransformationExtraArgs(init, update)


def check_transformation(opt: Any) -> optax.GradientTransformation:
    """``opt`` if it is an Optax transformation; else an error that says what it is instead.

    Raises:
      ArgumentTypeError: not a transformation; names the missing method, or the Optax equivalent.
    """
    if isinstance(opt, optax.GradientTransformation):
        return opt
    given = opt if isinstance(opt, type) else type(opt)
    for base in given.__mro__:
        library = _ROOTS_OF_OTHERS.get(base.__module__.split(".")[0])
        if library:
            stem = given.__name__.lower().removesuffix("optimizer")
            equivalent = _EQUIVALENTS.get(stem)
            write = f"optax.{equivalent}" if equivalent else "an Optax optimizer"
            raise ArgumentTypeError(
                f"The optimizer must be an Optax transformation; got {library}'s "
                f"{given.__name__}. Write {write} instead."
            )
    missing = [method for method in ("init", "update") if not callable(getattr(opt, method, None))]
    if not missing and not isinstance(opt, type):
        return optax.GradientTransformation(opt.init, opt.update)
    if callable(opt):
        name = getattr(opt, "__name__", repr(opt))
        raise ArgumentTypeError(
            f"The optimizer must be an Optax transformation; got the function or class {name}, "
            f"which makes one. Call it: {name}(learning_rate)."
        )
    tx = " Pass its .tx." if hasattr(opt, "tx") else ""
    raise ArgumentTypeError(
        f"The optimizer must be an Optax transformation, with init and update; got "
        f"{type(opt).__name__} ({opt!r:.80}), which has no {' and no '.join(missing)}.{tx}"
    )
