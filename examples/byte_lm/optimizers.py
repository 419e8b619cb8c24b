"""An optimizer by its name on the command line."""

import dataclasses
import importlib
import inspect

import optax
import optax.contrib

from crossshard.errors import ArgumentError

# The names of the learning rate in factories.
_LEARNING_RATES = ("learning_rate", "max_learning_rate", "lr", "step_size")

# Defaults for optimizers without one: the best of a grid with factor 4, after 150 steps of a
# small model of this kind.
_SUITABLE = {
    "acprop": 1e-3, "adadelta": 2.0, "adafactor": 0.02, "adagrad": 0.1, "fromage": 0.02,
    "galore": 4e-3, "lamb": 0.02, "lars": 2.0, "lion": 1e-3, "muon": 0.03, "noisy_sgd": 0.3,
    "novograd": 0.02, "optimistic_gradient_descent": 0.15, "radam": 4e-3, "rprop": 3e-4,
    "sgd": 0.3, "sign_sgd": 1e-3, "signum": 1e-3, "simplified_ademamix": 5e-4, "sm3": 0.03,
}  # fmt: skip
_OTHERWISE = 2e-3


@dataclasses.dataclass(frozen=True)
class InnerOptimizer:
    """An Optax transformation with its learning rate.

    Attributes:
      transformation: the transformation.
      learning_rate: what it was given or sets itself, at most; ``None`` if it knows none.
    """

    transformation: optax.GradientTransformation
    learning_rate: float | None


def make_optimizer(
    name: str, learning_rate: float | None, cosine_steps: int | None = None
) -> InnerOptimizer:
    """The optimizer of this name, with this or a default learning rate.

    Args:
      name: a name in ``optax`` or ``optax.contrib``, or ``package.module:factory``.
      learning_rate: goes to the parameter that the factory has for it.
      cosine_steps: over so many steps the rate rises, and then falls along a cosine, nearly to 0;
        ``None`` for one that stays.

    Raises:
      ArgumentError: there is none of this name, or it cannot be made with a learning rate alone.
    """
    module, _, short = name.rpartition(":")
    short = short.removeprefix("optax.").removeprefix("contrib.")
    try:
        modules = [importlib.import_module(module)] if ":" in name else [optax, optax.contrib]
        factory = next((getattr(each, short) for each in modules if hasattr(each, short)), None)
        if not callable(factory):
            raise ArgumentError(
                f"There is no optimizer {name!r}. Name one of optax or optax.contrib, such as "
                f"adamw, or one of your own as package.module:factory."
            )
        parameters = inspect.signature(factory).parameters
        key = next((each for each in _LEARNING_RATES if each in parameters), None)
        default = parameters[key].default if key else None
        rate = learning_rate
        if key is None and rate is not None:
            raise ArgumentError(f"{name} takes no learning rate. Leave --learning-rate out.")
        if rate is None and isinstance(default, int | float):
            rate = float(default)
        elif rate is None and (short in _SUITABLE or default is inspect.Parameter.empty):
            rate = _SUITABLE.get(short, _OTHERWISE)
        made = factory() if key is None or rate is None else factory(**{key: rate})
        if cosine_steps is not None:
            kind = inspect.Parameter.empty if key is None else parameters[key].annotation
            # Optax says of a rate that may be a schedule that it may be a function.
            is_fixed = kind is not inspect.Parameter.empty and "Callable" not in str(kind)
            if key is None or rate is None or is_fixed:
                raise ArgumentError(f"{name} takes no schedule. Leave --schedule out.")
            warm = optax.warmup_cosine_decay_schedule
            made = factory(**{key: warm(rate / 10, rate, cosine_steps // 20, cosine_steps)})
    except ArgumentError:
        raise
    except Exception as error:  # a module or a factory of the user's may raise anything
        first = (str(error).splitlines() or [""])[0].rstrip(".")
        raise ArgumentError(
            f"{name} could not be created: {type(error).__name__}: {first}. Name a function that "
            f"returns the optimizer, and needs a learning rate at most, as package.module:function."
        ) from None
    if not isinstance(made, optax.GradientTransformation):
        raise ArgumentError(
            f"{name} is not an optimizer: it returns {type(made).__name__}, and not an Optax "
            f"transformation."
        )
    return InnerOptimizer(made, rate)
