"""Which options of a step rule each other out: every pair is tried, and the list is here."""

import itertools
import re
import typing
from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import crossshard
from crossshard import make_train_step
from crossshard.errors import ArgumentError, CrossshardError
from crossshard.step import StepOptions

AGGREGATOR = "aggregator"


class Sums(crossshard.pipeline.Aggregator):
    """A sum of one's own."""

    def sum(self, values: Any, state: Any, peers: Any) -> tuple[Any, Any]:
        return peers.sum(values), state


# What each option passes: to make_train_step, to the optimizer, or a mesh.
OPTIONS: dict[str, dict[str, Any]] = {
    "loss_over='batch'": {"loss_over": "batch"},
    "loss_over='shard'": {"loss_over": "shard"},
    "virtual_shards": {"virtual_shards": 8},
    "sync_every": {"sync_every": 4},
    "sync_streaming": {"sync_every": 4, "sync_streaming": True},
    "outer_optimizer": {"sync_every": 4, "outer_optimizer": optax.sgd(0.7)},
    "params='sharded'": {"params": "sharded"},
    "gather_dtype='bfloat16'": {"params": "sharded", "gather_dtype": "bfloat16"},
    "gather_dtype='int8'": {"params": "sharded", "gather_dtype": "int8"},
    "weight_update='replicated'": {"weight_update": "replicated"},
    "weight_update='sharded'": {"weight_update": "sharded"},
    "reduce_dtype='bfloat16'": {"reduce_dtype": "bfloat16"},
    "reduce_dtype='int8'": {"reduce_dtype": "int8"},
    AGGREGATOR: {"aggregator": Sums()},
    "loss_scale": {"loss_scale": "dynamic"},
    "master_dtype": {"master_dtype": "float32"},
    "ema": {"ema": 0.9},
    "nonfinite='skip'": {"nonfinite": "skip"},
    "nonfinite='raise'": {"nonfinite": "raise"},
    "nonfinite='quarantine'": {"nonfinite": "quarantine"},
    "metrics='grad_norm'": {"metrics": "grad_norm"},
    "metrics='local_grad_norm'": {"metrics": "local_grad_norm"},
    "metrics='noise_scale'": {"metrics": "noise_scale"},
    "accumulate_steps": {"accumulate_steps": 2},
    "weight='mask'": {"weight": "mask"},
    "weight=function": {"weight": lambda batch: batch["mask"].sum()},
    "has_aux": {"has_aux": True},
    "aux_reduction='per_shard'": {"has_aux": True, "aux_reduction": "per_shard"},
    "aux_reduction='mean'": {"has_aux": True, "aux_reduction": "mean"},
    "aux_reduction='sum'": {"has_aux": True, "aux_reduction": "sum"},
    "model_state='mean'": {"model_state": "mean"},
    "model_state='per_shard'": {"model_state": "per_shard"},
    "wrt": {"wrt": lambda path, leaf: True},
    "batch_axis": {"batch_axis": 1},
    "replicated_entries": {"replicated_entries": ["table"]},
    "donate=False": {"donate": False},
    "rng_per='row'": {"rng_per": "row"},
    "check_divergence": {"check_divergence": 100},
    "on_divergence='repair'": {"check_divergence": 100, "on_divergence": "repair"},
    "mesh": {"mesh": ("shards", "model")},
    "preprocess": {"optimizer": {"preprocess": optax.clip(1.0)}},
    "group_assignment": {"optimizer": {"group_assignment": [[0, 1], [2, 3]]}},
    "reduction='sum'": {"optimizer": {"reduction": "sum"}},
    "incoming='local'": {"optimizer": {"incoming": "local"}},
}
_PARTS = ("params='sharded'", "gather_dtype='bfloat16'", "gather_dtype='int8'")
_ROUNDS = ("reduce_dtype='bfloat16'", "reduce_dtype='int8'", AGGREGATOR)
_OWN = ("nonfinite='quarantine'", "metrics='local_grad_norm'", "metrics='noise_scale'")
_WORKERS = ("sync_every", "sync_streaming", "outer_optimizer")
# As of the commit that wrote this test: whatever says so, these have to be refused.
REFUSED: dict[str, list[str]] = {
    "loss_over='batch'": [
        *("virtual_shards", *_WORKERS, "gather_dtype='int8'", *_ROUNDS, *_OWN),
        *("weight='mask'", "weight=function", "aux_reduction='per_shard'"),
        *("model_state='per_shard'", "preprocess", "group_assignment", "reduction='sum'"),
    ],
    "virtual_shards": [
        *(*_WORKERS, "gather_dtype='bfloat16'", "gather_dtype='int8'", *_ROUNDS, *_OWN),
        *("model_state='per_shard'", "mesh", "preprocess", "group_assignment"),
    ],
    **{name: [*_PARTS, "master_dtype", "ema"] for name in _WORKERS},
    **{name: ["weight_update='replicated'", "group_assignment"] for name in _PARTS},
    **{name: [AGGREGATOR] for name in _ROUNDS[:2]},
    "loss_scale": ["nonfinite='raise'", "nonfinite='quarantine'"],
    **{
        name: ["reduction='sum'"]
        for name in ("nonfinite='quarantine'", "weight='mask'", "weight=function")
    },
}
PAIRS = [(one, other) for one, others in REFUSED.items() for other in others]


def made_with(*names: str) -> crossshard.TrainStep | None:
    """A step of four shards with these options; ``None`` if they give an argument two values."""
    given: dict[str, Any] = {"optimizer": {}}
    for option in (OPTIONS[name] for name in names):
        both = given.keys() & option.keys() - {"optimizer"}
        if any(given[name] != option[name] for name in both):
            return None
        given |= option | {"optimizer": given["optimizer"] | option.get("optimizer", {})}
    of_optimizer, axes = given.pop("optimizer"), given.pop("mesh", None)
    optimizer: Any = optax.sgd(0.1)
    if of_optimizer:
        optimizer = crossshard.CrossShardOptimizer(optimizer, **of_optimizer)
    if axes is None:
        given["num_shards"] = 4
    else:
        given["mesh"] = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), axes)
        given["axis_name"] = axes[0]
    # No loss runs here: what it takes is all that is looked at.
    takes = ["params", *["model_state"] * ("model_state" in given), "batch"]
    takes += ["rng"] * (given.get("rng_per") == "row")
    loss_fn = eval(f"lambda {', '.join(takes)}: 0.0")
    return make_train_step(loss_fn, optimizer, **given)


def refusal(*names: str) -> CrossshardError | None:
    """The error of a step with these options; ``None`` if there is none."""
    try:
        made_with(*names)
    except CrossshardError as error:
        return error
    return None


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_alone_is_taken(name: str):
    assert made_with(name) is not None


def test_every_option_is_tried():
    tried = {name for given in OPTIONS.values() for name in (*given, *given.get("optimizer", ()))}
    # Where those of workers are tried, so is how they send.
    untried = set(typing.get_type_hints(StepOptions)) - tried
    assert untried == {"outer_reduce_dtype"}, "OPTIONS, in this file, has each option"


def test_the_pairs_that_are_refused_are_those_that_were():
    assert [pair for pair in itertools.combinations(OPTIONS, 2) if refusal(*pair)] == PAIRS


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_a_refusal_names_both_and_says_what_to_write(one: str, other: str):
    error = refusal(one, other)
    assert isinstance(error, ArgumentError)
    text = str(error).replace("_", " ").lower()
    for name in (one, other):
        # An aggregator may be named by what it is.
        words = [
            *OPTIONS[name],
            *OPTIONS[name].get("optimizer", {}),
            *["Sums"] * (name == AGGREGATOR),
        ]
        assert any(each.replace("_", " ").lower() in text for each in words), str(error)
    assert re.search(r"\. (Leave|Write|Use|Pass|Put|Weigh) ", str(error))
