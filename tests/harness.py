"""Whole steps of any case in any way, compared with one device that plain JAX and Optax train.

A case is a loss as its author writes it for one device. The factors say in which ways a step may
run it. ``check`` trains a row of factors and compares with the oracle, whose results are cached by
case, optimizer and precision: in a run of the tests each is compiled once.
"""

import dataclasses
import functools
import hashlib
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import crossshard
from crossshard import Checkpoints, Mean, make_train_step
from tests.quick import covering, fewest
from tests.step.test_refused_pairs import REFUSED

ROWS, WIDTH, VOCABULARY, LENGTH, STEPS, SEED = 32, 48, 96, 6, 3, 5
_rng = np.random.default_rng(3)


def normal(*shape: int, scale: float = 1.0) -> np.ndarray:
    """Normal numbers."""
    return np.float32(scale * _rng.normal(size=shape))


# Rows differ in more than noise, so that a shard that is left out or counts twice is seen.
_SLOPE = np.linspace(-1, 1, ROWS, dtype=np.float32)[:, None]
BATCHES = [
    {
        "x": normal(ROWS, WIDTH) + _SLOPE,
        "y": normal(ROWS, WIDTH) - _SLOPE,
        "tokens": _rng.integers(VOCABULARY, size=(ROWS, LENGTH + 1)),
        # A shard has from few to many of them.
        "mask": np.float32(_rng.random((ROWS, LENGTH)) < 0.6 + 0.3 * _SLOPE),
    }
    for _ in range(STEPS)
]
LINEAR = {"first": normal(WIDTH, WIDTH, scale=0.2), "bias": normal(WIDTH), "scale": np.float32(1.5)}
LINEAR["second"] = normal(WIDTH, WIDTH, scale=0.2)
# Of each, ``FROZEN`` says which leaf is not trained where only some are.
STACKED = {"layers": normal(3, WIDTH, WIDTH, scale=0.1), "out": normal(WIDTH, 40, scale=0.2)}
TIED = {"embedding": normal(VOCABULARY, WIDTH, scale=0.3), "inner": normal(WIDTH, WIDTH, scale=0.2)}
FROZEN = ("second", "layers", "inner")


def is_trained(path: Any, leaf: Any) -> bool:
    """The ``wrt`` of a step that trains some: a filter of NNX, and a function of path and leaf."""
    del leaf
    return not any(name in str(path) for name in FROZEN)


@dataclasses.dataclass(frozen=True)
class Case:
    """A loss of dictionaries of parameters.

    Attributes:
      loss: ``loss(params, batch[, keys])``; returns what ``make_train_step`` may be given.
      params: what it trains.
      options: what it needs of ``make_train_step``.
      plain: the same loss without what is ours.
    """

    loss: Callable[..., Any]
    params: dict[str, Any]
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    plain: Callable[..., Any] | None = None

    @property
    def takes_keys(self) -> bool:
        """Whether each row has a random key."""
        return self.options.get("rng_per") == "row"


def _hidden(params: Any, batch: Any) -> Any:
    return jnp.tanh(batch["x"] @ params["first"] + params["bias"])


def mlp(params: Any, batch: Any) -> Any:
    out = _hidden(params, batch) @ params["second"] * params["scale"]
    return ((out - batch["y"]) ** 2).mean()


def with_aux(params: Any, batch: Any) -> Any:
    hidden = _hidden(params, batch)
    return mlp(params, batch), {"active": (hidden > 0).mean()}


def scanned(params: Any, batch: Any) -> Any:
    layer = jax.checkpoint(lambda h, w: (h + 0.5 * jnp.tanh(h @ w), None))
    h, _ = lax.scan(layer, batch["x"], params["layers"])
    return 5 * ((h @ params["out"] - batch["y"][:, :40]) ** 2).mean()


def token_losses(params: Any, batch: Any) -> Any:
    """float[rows, length] of a language model whose embedding is its output, too."""
    tokens = batch["tokens"]
    h = params["embedding"][tokens[:, :-1]]
    h = h + jnp.tanh(jnp.cumsum(h, axis=1) @ params["inner"])
    logits = (h @ params["embedding"].T).astype(jnp.float32)
    # As large as the parameters, so that a wrong scale is more than a rounding.
    return 30 * optax.losses.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])


def tokens(params: Any, batch: Any) -> Any:
    return token_losses(params, batch).mean()


def masked(params: Any, batch: Any) -> Any:
    losses = token_losses(params, batch)
    return (losses * batch["mask"]).sum() / batch["mask"].sum()


def counted(params: Any, batch: Any) -> Any:
    losses = token_losses(params, batch)
    return Mean((losses * batch["mask"]).sum(), batch["mask"].sum())


def dropped(params: Any, batch: Any, keys: Any) -> Any:
    keep = jax.vmap(lambda key: jax.random.uniform(key, (WIDTH,), jnp.float32) < 0.7)(keys)
    out = jnp.where(keep, _hidden(params, batch) / 0.7, 0) @ params["second"] * params["scale"]
    return ((out - batch["y"]) ** 2).mean()


def contrastive(params: Any, batch: Any) -> Any:
    unit = lambda x: x / jnp.linalg.norm(x, axis=1, keepdims=True)
    logits = unit(_hidden(params, batch)) @ unit(batch["y"] @ params["second"]).T * params["scale"]
    return -30 * jnp.diag(jax.nn.log_softmax(5 * logits)).mean()


CASES = {
    "mlp": Case(mlp, LINEAR),
    "aux": Case(with_aux, LINEAR, {"has_aux": True}),
    "scanned": Case(scanned, STACKED),
    "tokens": Case(tokens, TIED),
    "masked": Case(masked, TIED, {"weight": "mask"}),
    "counted": Case(counted, TIED, plain=masked),
    "dropped": Case(dropped, LINEAR, {"rng_per": "row"}),
    "contrastive": Case(contrastive, LINEAR, {"loss_over": "batch"}),
}
# Plain SGD first: an optimizer that normalizes hides a wrong scale.
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.05, momentum=0.9, nesterov=True),
    "adamw": lambda: optax.adamw(1e-2, eps=1e-3, weight_decay=0.1),
    "clipped": lambda: optax.chain(
        optax.clip_by_global_norm(0.1), optax.sgd(optax.linear_schedule(1.0, 0.1, 4))
    ),
    "lamb": lambda: optax.lamb(1e-2, eps=1e-3),
    "muon": lambda: optax.contrib.muon(1e-2, eps=1e-3),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=16, eps=1e-3),
}


class Module(nnx.Module):
    """The parameters as an NNX module."""

    def __init__(self, params: dict[str, Any]) -> None:
        self.params = nnx.data({name: nnx.Param(jnp.asarray(x)) for name, x in params.items()})


class Equinox(eqx.Module):
    """The parameters as an Equinox module."""

    params: dict[str, jax.Array]
    name: str = eqx.field(static=True, default="a static field")


# How the parameters are handed over, and how a loss finds them again.
MODELS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "pytree": (lambda params: params, lambda model: model),
    "nnx": (Module, lambda model: {name: x[...] for name, x in model.params.items()}),
    "equinox": (
        lambda params: Equinox(jax.tree.map(jnp.asarray, params)),
        lambda model: model.params,
    ),
}
# What each value of a factor passes to ``make_train_step``.
OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "arrays": {
        "replicated": {"weight_update": "replicated"},
        "update sharded": {"weight_update": "sharded"},
        "params sharded": {"params": "sharded"},
    },
    "over": {
        "rows": {},
        "batch": {"loss_over": "batch"},
        "virtual": {"virtual_shards": 8},
    },
    "accumulate": {"1": {}, "2": {"accumulate_steps": 2}},
    "guard": {
        "none": {},
        "skip": {"nonfinite": "skip"},
        "quarantine": {"nonfinite": "quarantine"},
        "raise": {"nonfinite": "raise"},
        "divergence": {"check_divergence": 2},
        "norms": {"metrics": ("grad_norm", "update_norm", "param_norm")},
    },
    "wire": {
        "float32": {},
        "bfloat16": {"reduce_dtype": "bfloat16"},
        "int8": {"reduce_dtype": "int8"},
    },
    "precision": {"float32": {}, "bfloat16": {"master_dtype": "float32"}},
    "trained": {"all": {}, "some": {"wrt": is_trained}},
}
FACTORS: dict[str, tuple[str, ...]] = {
    "case": tuple(CASES),
    "optimizer": tuple(OPTIMIZERS),
    "model": tuple(MODELS),
    **{name: tuple(values) for name, values in OPTIONS.items()},
    "mesh": ("2", "4", "8", "explicit", "beside a model axis", "split over a model axis"),
    "path": ("calls", "restored", "restored on fewer", "resharded"),
}


@dataclasses.dataclass(frozen=True)
class Row:
    """One value of each factor."""

    case: str = "mlp"
    optimizer: str = "sgd"
    model: str = "pytree"
    arrays: str = "replicated"
    over: str = "rows"
    accumulate: str = "1"
    guard: str = "none"
    wire: str = "float32"
    precision: str = "float32"
    trained: str = "all"
    mesh: str = "4"
    path: str = "calls"

    def __str__(self) -> str:
        """What differs from the defaults."""
        fields = dataclasses.fields(self)
        told = [getattr(self, f.name) for f in fields if getattr(self, f.name) != f.default]
        return ", ".join(told) or "defaults"

    @property
    def options(self) -> dict[str, Any]:
        """What ``make_train_step`` is given besides the loss, the optimizer and the mesh."""
        found = dict(CASES[self.case].options)
        for factor, values in OPTIONS.items():
            found |= values[getattr(self, factor)]
        return found

    @property
    def is_possible(self) -> bool:
        """Whether the options go together, and the oracle knows what they round."""
        options = self.options
        if self.case == "contrastive" and self.over != "batch":
            return False
        # Microbatches compare fewer rows, and `weight=` is not for one loss of the whole batch.
        if self.case == "contrastive" and self.accumulate != "1":
            return False
        if self.mesh.endswith("model axis") and self.over == "virtual":
            return False
        # A state that is split over another axis stays on its mesh.
        if self.mesh.startswith("split") and self.path in ("restored on fewer", "resharded"):
            return False
        # A number of few bits may fall on the other side, which a normalized update makes a unit.
        is_rounded = (self.wire, self.precision) != ("float32", "float32")
        if is_rounded and self.optimizer not in ("sgd", "momentum"):
            return False
        given = {name for name, value in options.items()} | {
            f"{name}={value!r}" for name, value in options.items()
        }
        return not any(
            one in given and other in given for one, others in REFUSED.items() for other in others
        )


# What a step goes on with when it has fewer devices.
FEWER: dict[str, Any] = {"num_shards": 2, "mesh": None, "axis_name": None}


def mesh_of(name: str) -> dict[str, Any]:
    """The options that choose a mesh."""
    if name == "explicit":
        return {"mesh": jax.make_mesh((4,), ("shards",), axis_types=(AxisType.Explicit,))}
    if name.endswith("model axis"):
        types = (AxisType.Auto,) * 2
        mesh = jax.make_mesh((4, 2), ("shards", "model"), axis_types=types)
        return {"mesh": mesh, "axis_name": "shards"}
    return {"num_shards": int(name)}


def loss_of(row: Row) -> Callable[..., Any]:
    """The loss of a row, of its kind of model."""
    loss, of_model = CASES[row.case].loss, MODELS[row.model][1]
    if CASES[row.case].takes_keys:
        return lambda model, batch, rng: loss(of_model(model), batch, rng)
    return lambda model, batch: loss(of_model(model), batch)


def build(row: Row, **options: Any) -> crossshard.TrainStep:
    """The step of a row."""
    given = mesh_of(row.mesh) | row.options | options
    return make_train_step(loss_of(row), OPTIMIZERS[row.optimizer](), **given)


def start_of(row: Row) -> dict[str, Any]:
    """The parameters before the first step, in their precision, on devices if they are split."""
    params = {name: jnp.asarray(x, row.precision) for name, x in CASES[row.case].params.items()}
    if not row.mesh.startswith("split"):
        return params
    mesh = mesh_of(row.mesh)["mesh"]
    spec = lambda x: PartitionSpec(*[None] * (x.ndim - 1), *["model"] * (x.ndim > 1))
    return {name: jax.device_put(x, NamedSharding(mesh, spec(x))) for name, x in params.items()}


@dataclasses.dataclass(frozen=True)
class Run:
    """The parameters after the last step, and the loss of each."""

    params: dict[str, np.ndarray]
    losses: list[float]


def train(row: Row, folder: Path) -> Run:
    """What crossshard trains; after the first step it goes on where the row says."""
    make, read = MODELS[row.model]
    step, losses = build(row), []
    state = step.init(make(start_of(row)), SEED)
    for count, batch in enumerate(BATCHES):
        if count == 1 and row.path != "calls":
            before, step = step, build(row, **FEWER if row.path != "restored" else {})
            if row.path == "resharded":
                state = step.reshard(before.unshard(state))
            else:
                with Checkpoints(folder, before) as checkpoints:
                    checkpoints.save(state)
                with Checkpoints(folder, step) as checkpoints:
                    found = checkpoints.restore_latest(step.init(make(start_of(row))))
                    assert found is not None
                    state, _ = found
        own = step.own_rows(ROWS)
        state, metrics = step(state, {name: x[own] for name, x in batch.items()})
        losses.append(float(metrics["loss"]))
    step.finish(state)
    # Of several processes each has a part of what is sharded.
    params = process_allgather(read(step.model(state)), tiled=True)
    return Run({name: np.asarray(x, np.float64) for name, x in params.items()}, losses)


# The oracle: one device, plain JAX and Optax, in float64.


def _keys(count: int) -> Any:
    of_step = jax.random.fold_in(jax.random.key(SEED), count)
    return jax.vmap(lambda row: jax.random.fold_in(of_step, row))(jnp.arange(ROWS))


def _trained(name: str, optimizer_name: str, precision: str, which: str) -> Run:
    case, optimizer = CASES[name], OPTIMIZERS[optimizer_name]()
    loss, has_aux = case.plain or case.loss, bool(case.options.get("has_aux"))
    of_some = lambda some, frozen, *given: loss({**some, **frozen}, *given)
    value_and_grad = jax.jit(jax.value_and_grad(of_some, has_aux=has_aux))
    rounded = lambda tree: jax.tree.map(
        lambda x: x.astype(precision).astype(x.dtype) if precision != "float32" else x, tree
    )
    with jax.enable_x64(True):
        every = rounded({name: jnp.asarray(x, jnp.float64) for name, x in case.params.items()})
        frozen = {k: x for k, x in every.items() if which == "some" and not is_trained(k, x)}
        masters = {k: x for k, x in every.items() if k not in frozen}
        state, losses = optimizer.init(masters), []
        for count, batch in enumerate(BATCHES):
            keys = (_keys(count),) if case.takes_keys else ()
            wide = {k: x.astype("float64") if x.dtype == "float32" else x for k, x in batch.items()}
            value, gradients = value_and_grad(rounded(masters), frozen, wide, *keys)
            updates, state = optimizer.update(gradients, state, masters)
            masters = optax.apply_updates(masters, updates)
            losses.append(float(value[0] if has_aux else value))
        return Run(jax.device_get({**rounded(masters), **frozen}), losses)


@functools.cache
def oracle(case: str, optimizer: str, precision: str = "float32", trained: str = "all") -> Run:
    """What one device trains; kept on disk for other processes, and for the next run of the tests.

    The file is named after all that it depends on: the versions, this file, and what is asked.
    """
    versions = (jax.__version__, optax.__version__, Path(__file__).read_text())
    of = hashlib.sha256(repr((case, optimizer, precision, trained, versions)).encode()).hexdigest()
    path = Path(tempfile.gettempdir()) / f"crossshard-oracle-{os.getuid()}" / of
    path.parent.mkdir(mode=0o700, exist_ok=True)
    if not path.exists():
        run = _trained(case, optimizer, precision, trained)
        part = path.with_name(f"{of}.{os.getpid()}")
        arrays = {f"params/{name}": x for name, x in run.params.items()}
        with part.open("wb") as file:
            np.savez(file, losses=run.losses, **arrays)
        part.rename(path)
    with np.load(path) as found:
        params = {name[7:]: found[name] for name in found.files if name.startswith("params/")}
        return Run(params, list(found["losses"]))


# How far what a row rounds may move an update, relative to the largest of its array.
ROUNDING = {"float32": 2e-4, "bfloat16": 2.0**-6, "int8": 2.0**-5}


def difference(row: Row, got: Run, want: Run) -> float:
    """How far a run is from another, in units of what the row may round: right up to 1."""
    relative = max(ROUNDING[row.wire], ROUNDING[row.precision])
    worst = 0.0
    for name, start in start_of(row).items():
        start = np.asarray(start, np.float64)
        moved = np.abs(want.params[name] - start).max()
        # A unit in the last place: in 16 bits a number may fall on its other side.
        unit = np.abs(want.params[name]).max() * (2.0**-7 if row.precision == "bfloat16" else 1e-6)
        far = np.abs(got.params[name] - want.params[name]).max()
        worst = max(worst, far / (relative * moved + unit))
    losses = np.abs(np.subtract(got.losses, want.losses)).max()
    return max(worst, losses / (relative * np.abs(want.losses).max()))


def check(row: Row, folder: Path) -> None:
    """Raises unless the row trains as one device does."""
    want = oracle(row.case, row.optimizer, row.precision, row.trained)
    got = train(row, folder)
    assert difference(row, got, want) <= 1, (difference(row, got, want), got.losses, want.losses)


# Which rows are tried.


def made(**values: str) -> Row | None:
    """The row of these values, if it is possible."""
    row = Row(**values)
    return row if row.is_possible else None


def rows() -> list[Row]:
    """Rows in which every possible pair of values occurs."""
    return covering(FACTORS, made, seed=0)


def few(rows: list[Row]) -> list[Row]:
    """Of these as many as show every value, and all arrays with all that a loss is over."""

    def shown(row: Row) -> set[Any]:
        values = {(name, getattr(row, name)) for name in FACTORS}
        return values | {("together", row.arrays, row.over)}

    return fewest(rows, shown)
