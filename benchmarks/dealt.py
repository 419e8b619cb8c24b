"""Benchmark of updates leaf by leaf: optimizers that look at norms or at whole matrices.

``crossshard plan benchmarks.dealt:make`` plans Muon on a transformer of 1.3 billion parameters.
"""

import functools
from typing import Any

import jax
import optax
from optax import contrib

from benchmarks.jax_baselines import JaxCandidate, hand_written, ours
from benchmarks.models import matrices
from benchmarks.problem import Problem, adamw
from benchmarks.shapes import transformer
from benchmarks.step import NamedProblem, compared, sent

_CLIP = optax.clip_by_global_norm(1.0)


def muon(rate: float = 0.01) -> optax.GradientTransformation:
    """Muon, which takes the last two axes of what has two or more for matrices."""
    of = lambda x: contrib.MuonDimensionNumbers((x.ndim - 2,), (x.ndim - 1,))
    dimensions = lambda params: jax.tree.map(lambda x: of(x) if x.ndim > 1 else None, params)
    return contrib.muon(rate, muon_weight_dimension_numbers=dimensions)


def problems(quick: bool) -> list[NamedProblem]:
    """Matrices, with each of the optimizers."""
    small: dict[str, Any] = {"layers": 8, "width": 64} if quick else {}
    cases = {
        "Muon, 24 matrices": muon(),
        "Muon, a stack of 24 matrices": muon(),
        "AdamW behind a clip by the global norm": optax.chain(_CLIP, adamw()),
        "LAMB": optax.lamb(1e-3),
        "Adafactor": optax.adafactor(1e-3),
    }
    problem = lambda name, rule: functools.partial(
        matrices, optimizer=rule, stacked="stack" in name, **small
    )
    return [(name, problem(name, rule)) for name, rule in cases.items()]


def make_candidates(problem: Problem, shards: int) -> list[JaxCandidate]:
    """Leaf by leaf, with replicated and with sharded parameters, and all on every shard."""
    return [
        ours(problem, shards, "sharded"),
        ours(problem, shards, "sharded", params="sharded"),
        ours(problem, shards, "replicated"),
        hand_written(problem, shards),
    ]


def _facts(candidates: list[JaxCandidate]) -> dict[str, Any]:
    compiling = {each.name: each.seconds_to_compile() for each in candidates}
    return {**sent(candidates), "compiling": compiling}


measure = compared("dealt", problems, make_candidates, _facts)


def make(*, scan: bool = True) -> dict[str, Any]:
    """The arguments of ``crossshard.plan``: Muon, and two rows of 2,048 tokens for each device.

    Adam updates the embedding, as is usual.
    """
    model = transformer(scan=scan, checkpoint=True)
    rest = optax.adam(1e-3)
    optimizer = optax.partition(
        {"layers": muon(), "rest": rest},
        lambda params: {name: "layers" if name == "layers" else "rest" for name in params},
    )
    return {
        "loss_fn": lambda params, tokens: model.loss_fn(params, tokens),
        "params": model.params,
        "batch": model.batch,
        "optimizer": optimizer,
    }
