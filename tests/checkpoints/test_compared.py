"""What a restore compares: each option of a step, unless it is declared to change nothing."""

import dataclasses
import inspect
import typing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from crossshard import CrossShardOptimizer, Nonfinite, make_train_step
from crossshard.checkpoints.manifest import fingerprint
from crossshard.pipeline import DynamicLossScale, Quantized
from crossshard.pipeline.pipeline import STAGES
from crossshard.step import StepOptions
from crossshard.step.train_step import config_of
from examples.gradient_noise import GradientNoise
from examples.top_k import TopK
from tests.checkpoints.common import program

ONE, OTHER = optax.sgd(0.1), optax.sgd(0.2)
PARAMS = {"w": jax.ShapeDtypeStruct((37, 16), jnp.float32)}


def loss_fn(params: Any, x: Any) -> jax.Array:
    return ((x @ params["w"]) ** 2).mean()


def mesh_of(*axes: str) -> jax.sharding.Mesh:
    return jax.make_mesh((*(1,) * (len(axes) - 1), 2), axes)


RARELY = {"sync_every": 2, "outer_optimizer": ONE}
# Of each option what goes with it, and two values.
EXAMPLES: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "loss_fn": ({}, loss_fn, lambda params, x: loss_fn(params, x)),
    "optimizer": ({}, ONE, OTHER),
    "mesh": ({}, mesh_of("x"), mesh_of("y")),
    "num_shards": ({}, 2, 4),
    "axis_name": ({"mesh": mesh_of("a", "b")}, "b", ("a", "b")),
    "weight_update": ({}, "sharded", "replicated"),
    "params": ({}, "sharded", "replicated"),
    "loss_over": ({}, "rows", "shard"),
    "weight": ({}, None, "mask"),
    "has_aux": ({}, False, True),
    "wrt": ({}, None, lambda path, leaf: True),
    "model_state": ({"loss_fn": lambda p, s, batch: (0.0, s)}, "per_shard", "mean"),
    "batch_axis": ({}, 0, 1),
    "replicated_entries": ({}, (), ("table",)),
    "donate": ({}, True, False),
    "gather_dtype": ({"params": "sharded"}, "int8", "int4"),
    "rng_per": ({"loss_fn": lambda params, batch, rng: 0.0}, "shard", "row"),
    "aux_reduction": ({"has_aux": True}, "mean", "sum"),
    "sync_every": ({"outer_optimizer": ONE}, 2, 3),
    "outer_optimizer": ({"sync_every": 2}, ONE, OTHER),
    "outer_reduce_dtype": (RARELY, "int8", "int4"),
    "sync_streaming": (RARELY, True, False),
    "check_divergence": ({}, 5, None),
    "on_divergence": ({"check_divergence": 5}, "raise", "repair"),
    "virtual_shards": ({}, 4, 8),
    "accumulate_steps": ({}, 2, 4),
    "metrics": ({}, "grad_norm", "update_norm"),
    "reduce_dtype": ({}, "int8", Quantized("int8", "stochastic")),
    "aggregator": ({}, TopK(0.1), TopK(0.2)),
    "loss_scale": ({}, DynamicLossScale(growth_interval=3), "dynamic"),
    "master_dtype": ({}, "float32", "float64"),
    "ema": ({}, 0.9, optax.constant_schedule(0.9)),
    "nonfinite": ({}, Nonfinite("skip", 5), Nonfinite("skip", 6)),
    # Of CrossShardOptimizer.
    "opt": ({}, ONE, OTHER),
    "reduction": ({}, "sum", "mean"),
    "name": ({}, "One", "Other"),
    "group_assignment": ({"num_shards": 4}, [[0, 1], [2, 3]], [[0, 2], [1, 3]]),
    "preprocess": ({}, GradientNoise(0.1), GradientNoise(0.2)),
    "incoming": ({}, None, "local"),
}
OF_WRAPPER = {"opt", "reduction", "name", "group_assignment", "preprocess", "incoming"}

# Of which the options tell nothing: they change no state, or the manifest or the arrays tell.
SILENT = set(
    "loss_fn mesh num_shards axis_name weight_update params has_aux wrt batch_axis "
    "replicated_entries donate aux_reduction check_divergence on_divergence metrics name "
    "group_assignment incoming".split()
)


def config_with(options: dict[str, Any]) -> Any:
    options = {"loss_fn": loss_fn, "opt": ONE, **options}
    if "mesh" not in options:
        options = {"num_shards": 2, **options}
    wrapped = {name: options.pop(name) for name in OF_WRAPPER & options.keys()}
    return config_of(make_train_step(**{"optimizer": CrossShardOptimizer(**wrapped), **options}))


def test_each_option_has_an_example():
    names = set(typing.get_type_hints(StepOptions))
    for function in (make_train_step, CrossShardOptimizer.__new__):
        names |= set(inspect.signature(function).parameters) - {"cls", "options"}
    assert names == set(EXAMPLES), "EXAMPLES, in this file, has one of each option"
    assert names >= {name for kind in STAGES for name in kind.options}


@pytest.mark.parametrize("name", EXAMPLES)
def test_each_option_is_compared_or_declared_not_to_be(name: str):
    others, one, other = EXAMPLES[name]
    # Once more the same, so that what differs is the option.
    configs = [config_with({**others, name: value}) for value in (one, one, other)]
    first, again, last = (fingerprint(config, PARAMS) for config in configs)
    assert first == again
    # What is declared by mistake would change what a state means without a word.
    assert (first == last) == (name in SILENT)


# Objects of the user's, which are others in each process and in each function.


class Token:
    """Its text has its address."""


@dataclasses.dataclass(frozen=True)
class Given:
    """A weight, or a decay by schedule."""

    token: Any

    def __call__(self, given: Any) -> Any:
        return jnp.float32(0.5)


class Counts(TopK):
    """Has attributes that are no fields, and says nothing of itself."""

    def __init__(self, part: float, calls: int):
        super().__init__(part)
        self.__dict__.update(calls=calls, token=Token())

    def describe(self) -> str:
        return "in its own way"


class Renamed(Counts):
    """The same of another name."""


@dataclasses.dataclass(frozen=True)
class Fields(TopK):
    """Has fields of all kinds."""

    sizes: Any = (1, 2)
    token: Any = dataclasses.field(default_factory=lambda: [Token()])
    calls: int = dataclasses.field(default=0, compare=False)


ELSEWHERE = """
import crossshard
crossshard.cpu_devices(8)
from tests.checkpoints.test_compared import of_arrays
print(of_arrays(4, params="sharded"))
"""


def of_arrays(shards: int, **options: Any) -> Any:
    """What is told of an optimizer that gives two arrays of one shape other rates, from a table."""
    table = np.linspace(0.1, 0, 10, dtype=np.float32)
    rate = lambda count: jnp.asarray(table)[jnp.minimum(count, 9)]
    by_label = {"slow": optax.adamw(0.001, mask={"v": True, "w": False}), "fast": optax.sgd(rate)}
    optimizer = optax.partition(by_label, {"v": "slow", "w": "fast"})
    step = make_train_step(loss_fn, optimizer, num_shards=shards, **options)
    return fingerprint(config_of(step), {"v": PARAMS["w"], **PARAMS}).updates


@pytest.mark.deep
def test_an_update_is_the_same_in_another_process_and_on_other_shards():
    running = program(ELSEWHERE)
    found, errors = running.communicate(timeout=120)
    assert found == f"{of_arrays(2, weight_update='replicated')}\n", errors


def made_elsewhere() -> Any:
    return lambda batch: jnp.float32(1)


# Two values of an option, and what differs between them.
PAIRS: list[tuple[str, Any, Any, set[str]]] = [
    ("weight", Given(Token()), Given(Token()), set()),
    ("weight", lambda batch: jnp.float32(1), made_elsewhere(), set()),
    ("ema", Given(Token()), Given([Token()]), set()),
    ("aggregator", Counts(0.1, 1), Counts(0.1, 0), set()),
    ("aggregator", Counts(0.1, 1), Renamed(0.1, 1), {"aggregator"}),
    ("aggregator", Fields(0.1, calls=1), Fields(0.1, calls=0), set()),
    ("aggregator", Fields(0.1), Fields(0.1, {"w": (1, 2)}), {"aggregator.sizes"}),
    ("aggregator", Fields(0.1, {"w": 1, "v": 2}), Fields(0.1, {"v": 2, "w": 1}), set()),
]


@pytest.mark.parametrize("place", range(len(PAIRS)))
def test_the_same_of_another_process_or_function_is_the_same(place: int):
    name, *pair, differ = PAIRS[place]
    one, other = (fingerprint(config_with({name: each}), PARAMS) for each in pair)
    assert {key for key in one.options if one.options[key] != other.options[key]} == differ
    assert (one == other) == (not differ)
    assert " at 0x" not in str(one)
