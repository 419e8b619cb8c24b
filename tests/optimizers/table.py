"""Every update rule of optax and optax.contrib, set up so that it moves far in a few steps."""

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
import optax
from jax.flatten_util import ravel_pytree
from optax import contrib


@dataclasses.dataclass(frozen=True)
class Row:
    """One rule of the table.

    Attributes:
      make: makes the rule, plain.
      covers: names of other factories that only make sense inside a composition such as this one.
      value: whether the rule is given the loss as ``value``.
      hessian: whether the rule is given the loss function as ``obj_fn``, to estimate the Hessian's
        diagonal from. It has to be the loss of all shards, which the caller sees to; there is no
        such function for a group that JAX could differentiate under ``check_vma=True``.
      untyped_groups: why JAX cannot type the rule where shards differ, as they do under groups:
        those run with ``check_vma=False`` then.
      not_stateful: why the stateful idiom does not take the rule.
    """

    make: Callable[[], optax.GradientTransformation]
    covers: tuple[str, ...] = ()
    value: bool = False
    hessian: bool = False
    untyped_groups: str = ""
    not_stateful: str = ""


def across_leaves(rate: float) -> optax.GradientTransformation:
    """SGD on gradients whose mean over all leaves is 0, which needs all of them at once."""

    def update(updates: Any, params: Any = None) -> Any:
        del params
        flat, unravel = ravel_pytree(updates)
        return unravel(flat - flat.mean())

    return optax.chain(optax.stateless(update), optax.sgd(rate, momentum=0.9))


def _matrices(params: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def _by_rank(params: Any) -> Any:
    return jax.tree.map(lambda leaf: "matrix" if leaf.ndim > 1 else "vector", params)


def _then_step(*transforms: optax.GradientTransformation, rate: float = 0.1) -> Any:
    return optax.chain(*transforms, optax.scale(-rate))


def _every_second(step: Any, **_: Any) -> Any:
    return step % 2 == 0


def _norm_ema() -> optax.GradientTransformation:
    return optax.measure_with_ema(optax.tree.norm, 0.9)


_BIAS = {"bias": True, "kernel": False}
_MASK_IS_A_TREE = "its mask must be a tree like the parameters, and no function of them"
_DECAY = optax.exponential_decay(0.2, 2, 0.5)
_ADAM = optax.scale_by_adam

# What people call an optimizer: used alone, it trains. A name is the factory's, with a note after
# a space where it comes more than once; those of optax.contrib stand behind "contrib.".
OPTIMIZERS: dict[str, Row] = {
    # With a learning rate alone.
    **{
        name: Row(functools.partial(getattr(optax, name), 0.05))
        for name in "adabelief adamax amsgrad nadam optimistic_adam rmsprop rprop "
        "sign_sgd signum yogi".split()
    },
    **{
        f"contrib.{name}": Row(functools.partial(getattr(contrib, name), 0.05))
        for name in ("acprop", "adopt", "madgrad")
    },
    "adadelta": Row(lambda: optax.adadelta(1.0, eps=1e-2)),
    "adafactor": Row(lambda: optax.adafactor(0.2, min_dim_size_to_factor=1)),
    "adafactor (momentum, unfactored)": Row(
        lambda: optax.adafactor(0.2, momentum=0.9, weight_decay_rate=1e-2)
    ),
    "adagrad": Row(lambda: optax.adagrad(0.2)),
    "adam": Row(lambda: optax.adam(0.05)),
    "adamaxw": Row(lambda: optax.adamaxw(0.05, weight_decay=0.1)),
    "adamw": Row(lambda: optax.adamw(_DECAY, weight_decay=0.1)),
    "adan": Row(lambda: optax.adan(0.05, weight_decay=0.1)),
    "fromage": Row(lambda: optax.fromage(0.1)),
    "lamb": Row(lambda: optax.lamb(0.1, weight_decay=0.1)),
    "lars": Row(lambda: optax.lars(0.5, weight_decay=0.1, trust_coefficient=0.1)),
    "lbfgs (no line search)": Row(lambda: optax.lbfgs(0.2, memory_size=3, linesearch=None)),
    "lion": Row(lambda: optax.lion(0.02, weight_decay=0.1)),
    "nadamw": Row(lambda: optax.nadamw(0.05, weight_decay=0.1)),
    # One key on every shard, so one noise; that is how the parameters stay replicas.
    "noisy_sgd": Row(lambda: optax.noisy_sgd(0.1, eta=0.1, key=7)),
    "novograd": Row(lambda: optax.novograd(0.2, weight_decay=0.1)),
    "optimistic_adam_v2": Row(lambda: optax.optimistic_adam_v2(0.05, alpha=0.5)),
    "optimistic_gradient_descent": Row(lambda: optax.optimistic_gradient_descent(0.1)),
    "polyak_sgd": Row(lambda: optax.polyak_sgd(0.5, f_min=0.1), value=True),
    # b2 and threshold such that both of its ways of stepping are taken.
    "radam": Row(lambda: optax.radam(0.05, b2=0.9, threshold=4.0)),
    "rmsprop (centered, momentum)": Row(
        lambda: optax.rmsprop(0.05, centered=True, momentum=0.5, nesterov=True)
    ),
    "sgd": Row(lambda: optax.sgd(0.1)),
    "sgd (schedule, Nesterov)": Row(lambda: optax.sgd(_DECAY, momentum=0.9, nesterov=True)),
    "sm3": Row(lambda: optax.sm3(0.2)),
    "contrib.ademamix": Row(lambda: contrib.ademamix(0.05, b3=0.99, weight_decay=0.1)),
    "contrib.cocob": Row(lambda: contrib.cocob(alpha=2.0)),
    "contrib.dadapt_adamw": Row(lambda: contrib.dadapt_adamw(estim_lr0=0.05)),
    "contrib.dog": Row(lambda: contrib.dog(init_step=("distance", 0.1))),
    "contrib.dowg": Row(lambda: contrib.dowg(init_estim_sq_dist=0.05)),
    "contrib.galore": Row(lambda: contrib.galore(0.1, rank=2, update_proj_gap=2)),
    "contrib.mechanize": Row(lambda: contrib.mechanize(optax.sgd(0.5), s_init=0.1)),
    "contrib.momo": Row(lambda: contrib.momo(0.5), value=True),
    "contrib.momo_adam": Row(lambda: contrib.momo_adam(0.1), value=True),
    "contrib.muon": Row(lambda: contrib.muon(0.05, adam_learning_rate=0.05)),
    "contrib.prodigy": Row(lambda: contrib.prodigy(estim_lr0=0.05)),
    # Of two steps one is adversarial: both see the reduced gradient.
    "contrib.sam": Row(
        lambda: contrib.sam(optax.sgd(0.2), optax.chain(contrib.normalize(), optax.sgd(0.1)))
    ),
    "contrib.schedule_free": Row(lambda: contrib.schedule_free(optax.sgd(0.2), 0.2)),
    "contrib.schedule_free_adamw": Row(lambda: contrib.schedule_free_adamw(0.1, 2)),
    "contrib.schedule_free_sgd": Row(lambda: contrib.schedule_free_sgd(0.2, 2)),
    "contrib.simplified_ademamix": Row(
        lambda: contrib.simplified_ademamix(0.01, alpha=0.5, weight_decay=0.1)
    ),
    "contrib.sophia": Row(
        lambda: contrib.sophia(0.05, update_interval=2),
        covers=("contrib.hutchinson_estimator_diag_hessian",),
        hessian=True,
        not_stateful="obj_fn takes parameters, and the stateful idiom's losses take none",
    ),
}

# What optimizers are built of, each in the smallest composition that trains.
TRANSFORMS: dict[str, Row] = {
    **{
        name: Row(lambda name=name: _then_step(getattr(optax, name)()))
        for name in (
            "centralize normalize_by_update_norm scale_by_param_block_norm scale_by_param_block_rms"
        ).split()
    },
    "adaptive_grad_clip": Row(lambda: _then_step(optax.adaptive_grad_clip(0.5))),
    "add_decayed_weights": Row(lambda: _then_step(optax.add_decayed_weights(0.5, _matrices))),
    "add_noise": Row(lambda: _then_step(optax.add_noise(0.1, 0.5, key=7))),
    "apply_every": Row(lambda: optax.chain(optax.apply_every(2), optax.sgd(0.1))),
    "apply_if_finite": Row(lambda: optax.apply_if_finite(optax.adam(0.05), 2)),
    "chain": Row(lambda: optax.chain(optax.clip_by_global_norm(0.2), optax.adamw(0.05))),
    "clip_by_block_rms": Row(lambda: _then_step(optax.clip_by_block_rms(0.1))),
    "clip_by_global_norm": Row(lambda: _then_step(optax.clip_by_global_norm(0.5))),
    "conditionally_transform": Row(
        lambda: optax.chain(
            optax.conditionally_transform(optax.clip(0.1), _every_second), optax.sgd(0.1)
        )
    ),
    "flatten": Row(lambda: optax.flatten(optax.adam(0.05))),
    "freeze": Row(
        lambda: optax.chain(optax.sgd(0.1), optax.freeze(_BIAS)), not_stateful=_MASK_IS_A_TREE
    ),
    "inject_hyperparams": Row(lambda: optax.inject_hyperparams(optax.adam)(_DECAY)),
    "keep_params_nonnegative": Row(
        lambda: optax.chain(optax.sgd(0.1), optax.keep_params_nonnegative())
    ),
    "lookahead": Row(
        lambda: optax.lookahead(optax.sgd(0.2), 2, 0.5),
        not_stateful="its parameters are a pair, fast and slow, and not variables",
    ),
    "masked": Row(lambda: optax.chain(optax.masked(_ADAM(), _matrices), optax.scale(-0.05))),
    "monitor": Row(
        lambda: optax.chain(
            optax.monitor({"now": optax.tree.norm, "ema": _norm_ema()}), optax.sgd(0.1)
        ),
        covers=("measure_with_ema",),
        not_stateful="its state has another structure after the first step than before",
    ),
    "MultiSteps": Row(lambda: optax.MultiSteps(optax.adam(0.1), 2)),
    "partition": Row(
        lambda: optax.partition({"matrix": optax.adam(0.05), "vector": optax.sgd(0.1)}, _by_rank)
    ),
    "scale_by_distance_over_gradients": Row(
        lambda: _then_step(optax.scale_by_distance_over_gradients(reps_rel=0.1), rate=1.0)
    ),
    "selective_transform": Row(
        lambda: optax.selective_transform(optax.adam(0.05), freeze_mask=_BIAS),
        not_stateful=_MASK_IS_A_TREE,
    ),
    "snapshot": Row(
        lambda: optax.chain(
            optax.snapshot("norm", lambda updates, **_: optax.tree.norm(updates)), optax.sgd(0.1)
        )
    ),
    "stateless": Row(
        lambda: optax.stateless(lambda updates, _: jax.tree.map(lambda u: -0.1 * u, updates))
    ),
    "trace": Row(lambda: _then_step(optax.trace(0.9, nesterov=True))),
    "zero_nans": Row(lambda: optax.chain(optax.zero_nans(), optax.sgd(0.1))),
    "contrib.normalize": Row(lambda: _then_step(contrib.normalize())),
    "contrib.reduce_on_plateau": Row(
        lambda: optax.chain(optax.sgd(0.2), contrib.reduce_on_plateau(0.5, patience=1, cooldown=1)),
        value=True,
        untyped_groups="one branch of its cond gives a constant, the other what it was given",
    ),
    "contrib.split_real_and_imaginary": Row(
        lambda: contrib.split_real_and_imaginary(optax.adam(0.05))
    ),
}

# What only scales is in an optimizer too, with the same state, and some are others' simplest cases.
SCALES = {
    *("clip", "conditionally_mask", "ema", "identity", "inject_stateful_hyperparams"),
    *("multi_transform", "named_chain", "scale", "set_to_zero", "stateless_with_tree_map"),
    "WrappedSchedule",
    *(
        f"scale_by_{name}"
        for name in (
            "adadelta adam adamax adan amsgrad belief factored_rms lbfgs learning_rate lion "
            "novograd optimistic_gradient polyak radam rms rprop rss schedule sign sm3 stddev "
            "trust_ratio yogi"
        ).split()
    ),
    *(
        f"contrib.scale_by_{name}"
        for name in "acprop ademamix adopt cocob galore madgrad muon simplified_ademamix".split()
    ),
}

_LINE_SEARCH = "a line search: it evaluates the loss itself, at points of its own choice"
_PER_EXAMPLE = "per-example gradients: it clips each example's before any are averaged"

# The public factories that are in neither table, each with the reason.
LEFT_OUT: dict[str, str] = {
    "GradientTransformation": "no rule: the type of all of them",
    "GradientTransformationExtraArgs": "no rule: the type of all of them",
    "with_extra_args_support": "no rule: it changes what a rule accepts, not what it does",
    "scale_by_backtracking_linesearch": _LINE_SEARCH,
    "scale_by_zoom_linesearch": _LINE_SEARCH,
    "contrib.differentially_private_aggregate": _PER_EXAMPLE,
    "contrib.dpsgd": _PER_EXAMPLE,
}

ROWS = OPTIMIZERS | TRANSFORMS

# Where not all are tried in `make test`, these are: one of each kind of state, of what it reads
# of the gradients, and of extra arguments.
SOME = [
    *("sgd", "adam", "adamw", "lamb", "adafactor", "lars", "noisy_sgd", "polyak_sgd"),
    *("contrib.muon", "contrib.schedule_free", "contrib.prodigy", "contrib.sophia"),
    *("clip_by_global_norm", "MultiSteps", "apply_if_finite", "contrib.reduce_on_plateau"),
]


def public_factories() -> list[str]:
    """The names of everything public in optax and optax.contrib that makes a transformation."""
    return [
        prefix + name
        for prefix, module in (("", optax), ("contrib.", contrib))
        for name, thing in _public(module)
        if _makes_transformation(thing)
    ]


def _public(module: types.ModuleType) -> Iterator[tuple[str, Any]]:
    for name, thing in sorted(vars(module).items()):
        if not name.startswith("_") and callable(thing) and not isinstance(thing, types.ModuleType):
            yield name, thing


def _makes_transformation(thing: Any) -> bool:
    if inspect.isclass(thing):
        return hasattr(thing, "init") and hasattr(thing, "update")
    if not inspect.isroutine(thing) and not hasattr(thing, "func"):
        return False  # a type alias
    made = inspect.signature(thing).return_annotation
    if made is not inspect.Signature.empty:
        return inspect.isclass(made) and issubclass(made, optax.GradientTransformation)
    # Some say nothing of what they return, so they are tried with what factories usually take.
    return any(_returns_transformation(thing, args) for args in ((), (0.1,), (optax.sgd(0.1),)))


def _returns_transformation(factory: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    try:
        return isinstance(factory(*args), optax.GradientTransformation)
    except Exception:  # whatever a function that is no factory thinks of such arguments
        return False
