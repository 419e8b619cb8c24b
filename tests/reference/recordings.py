"""The recorded runs of the original, and the Optax rule that stands for each of its optimizers."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

RULES = {
    "sgd": lambda lr: optax.sgd(lr),
    "momentum": lambda lr: optax.sgd(lr, 0.9),
    "nesterov": lambda lr: optax.sgd(lr, 0.9, nesterov=True),
    "adam": lambda lr: optax.adam(lr),
    "adagrad": lambda lr: optax.adagrad(lr, 0.1, eps=0.0),
    "adadelta": lambda lr: optax.adadelta(lr, rho=0.95, eps=1e-6),
    "rmsprop": lambda lr: optax.rmsprop(lr, 0.9, eps=1e-10, initial_scale=1.0, eps_in_sqrt=True),
    "rmsprop_momentum": lambda lr: optax.chain(
        optax.scale_by_rms(0.9, 1e-6, 1.0, True), optax.scale(lr), optax.trace(0.5), optax.scale(-1)
    ),
}


@dataclasses.dataclass(frozen=True)
class Recording:
    """One run of the original."""

    number: int
    case: dict[str, Any]
    arrays: dict[str, np.ndarray]

    @property
    def name(self) -> str:
        """The case in a few words, for a test's id."""
        words = [self.case["optimizer"], self.case["reduction"], f"{self.case['num_shards']}shards"]
        words += ["groups"] if self.case["group_assignment"] else []
        words += [w for w in ("local_clip", "unused", "global_step") if self.case.get(w)]
        return "-".join(words)

    @property
    def tolerance(self) -> float:
        """Adam divides by the root of nearly nothing at first, which costs it some digits."""
        return 5e-6 if self.case["optimizer"] == "adam" else 2e-6

    @property
    def names(self) -> list[str]:
        """The variables, that which the loss does not touch last."""
        return [key.split("/")[1] for key in self.arrays if key.startswith("init/")]

    def rule(self) -> optax.GradientTransformation:
        """The Optax rule that stands for the original's optimizer."""
        return RULES[self.case["optimizer"]](self.case["lr"])

    def under(self, prefix: str) -> dict[str, np.ndarray]:
        """What was recorded under a prefix, by the rest of the key."""
        return {
            key.removeprefix(prefix): value
            for key, value in self.arrays.items()
            if key.startswith(prefix)
        }


def _without_counterpart(case: dict[str, Any], key: str) -> bool:
    # TensorFlow's RMSProp keeps a momentum slot also where its momentum is 0; Optax keeps none.
    return case["optimizer"] == "rmsprop" and "/slot/momentum/" in key


def load() -> list[Recording]:
    """All recorded runs."""
    with np.load(Path(__file__).parent / "tf1_cross_shard.npz") as data:
        cases = json.loads(str(data["cases"]))
        return [
            Recording(
                number,
                case,
                {
                    key.split("/", 1)[1]: data[key]
                    for key in data.files
                    if key.startswith(f"{number:02d}/") and not _without_counterpart(case, key)
                },
            )
            for number, case in enumerate(cases)
        ]


def predict(params: dict[str, Any], x: Any) -> Any:
    """The recorded runs' model."""
    return jnp.tanh(x @ params["w1"] + params["b1"]) @ params["w2"] + params["b2"]


def loss(params: dict[str, Any], x: Any, y: Any) -> Any:
    """The recorded runs' loss, one shard's own."""
    return jnp.mean((predict(params, x) - y) ** 2)
