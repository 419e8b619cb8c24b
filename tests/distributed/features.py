"""Every feature of the package, each as a function of a job of any number of processes."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import crossshard
from crossshard import Checkpoints, CrossShardOptimizer, make_train_step
from tests.step.faults import Snapshot, many_bits

STEPS = 3
_rng = np.random.default_rng(3)
START = {
    "kernel": np.float32(_rng.normal(size=(16, 32)) / 4),
    "bias": np.float32(_rng.normal(size=3)),
}
# As many rows as 16 shards of 2 microbatches can share.
X = np.float32(_rng.normal(size=(STEPS, 32, 16)) + np.linspace(-1, 1, 32)[:, None])
MASK = np.float32(np.arange(32) % 3 > 0)
RULES = {
    "sgd": lambda: optax.sgd(0.1, momentum=0.9),
    "adamw": lambda: optax.adamw(0.01, eps=1e-4),
}
UPDATES = ("replicated", "sharded")


@dataclasses.dataclass(frozen=True)
class Job:
    """The processes, the devices of each, which process this is, and a folder for all of them."""

    folder: Path
    processes: int
    devices: int
    process: int

    @property
    def shards(self) -> int:
        return self.processes * self.devices

    def own(self, x: np.ndarray) -> np.ndarray:
        """The rows of this process."""
        return np.split(x, self.processes)[self.process]

    def batches(self) -> list[dict[str, np.ndarray]]:
        return [{"x": self.own(x), "mask": self.own(MASK)} for x in X]

    def mesh(self, *shape: int, names: tuple[str, ...] = ("shards",)) -> Mesh:
        devices = np.array(jax.devices()[: self.shards])
        return Mesh(devices.reshape(shape or self.shards), names)

    def step(self, loss: Any = None, rule: str = "adamw", **options: Any) -> Any:
        options = {"num_shards": self.shards, "weight_update": "sharded"} | options
        return make_train_step(loss or loss_fn, RULES[rule](), **options)

    def groups(self) -> list[list[int]]:
        half = max(self.shards // 2, 1)
        return np.arange(self.shards).reshape(-1, half).tolist()


def loss_fn(params: Any, batch: Any) -> jax.Array:
    rows = ((jnp.tanh(batch["x"] @ params["kernel"]) - 1) ** 2).mean(-1)
    return rows.mean() + ((params["bias"] - 1) ** 2).sum()


def weighted(params: Any, batch: Any) -> jax.Array:
    rows = ((jnp.tanh(batch["x"] @ params["kernel"]) - 1) ** 2).mean(-1)
    counts = jnp.maximum(batch["mask"].sum(), 1e-9)
    return (rows * batch["mask"]).sum() / counts + ((params["bias"] - 1) ** 2).sum()


def trained(job: Job, step: Any, start: Any = START, **further: Any) -> tuple[Any, dict[str, Any]]:
    """The state after the batches, and what can be compared: losses, parameters, their state."""
    state, losses, metrics = step.init(start, 3), [], {}
    for batch in job.batches():
        state, metrics = step(state, batch | further)
        losses.append(metrics["loss"])
    whole = step.unshard(state)
    found = {"params": whole.params, "opt_state": whole.opt_state, "losses": losses}
    return state, found | {"metrics": {k: v for k, v in metrics.items() if k != "loss"}}


FEATURES: dict[str, Callable[[Job], Any]] = {}


def feature(function: Callable[..., Any], *args: Any) -> Any:
    """Add a row to the table."""
    name = " ".join([function.__name__, *args]).replace("_", " ")
    FEATURES[name] = functools.partial(function, *args) if args else function
    return function


# The whole step.

WIDE = START | {"wide": np.ones((64, 64), np.float32) / 64}


def wide_loss(params: Any, batch: Any) -> jax.Array:
    return loss_fn(params, batch) + (jnp.tanh(batch["x"] @ params["wide"][:16]) ** 2).mean()


@feature
def tiers(job: Job) -> Any:
    """Few bits between halves of the shards, and all of them inside."""
    hosts = min(2, job.shards)
    mesh = job.mesh(hosts, job.shards // hosts, names=("host", "chip"))
    options: Any = {"num_shards": None, "mesh": mesh, "reduce_dtype": {"host": "int8"}}
    return trained(job, job.step(wide_loss, "sgd", **options), WIDE)[1]


@feature
def workers_that_synchronise_rarely(job: Job) -> Any:
    opt = CrossShardOptimizer(optax.adam(0.01, eps=1e-4), group_assignment=job.groups())
    outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
    found = {}
    for streaming in (False, True):
        options: Any = {"sync_every": 2, "sync_streaming": streaming, "outer_optimizer": outer}
        step = make_train_step(loss_fn, opt, num_shards=job.shards, **options)
        state, results = trained(job, step)
        found[f"streaming={streaming}"] = results | {"model": step.model(state)}
    return found


@feature
def weights_metrics_average_and_evaluation(job: Job) -> Any:
    names = ["grad_norm", "local_grad_norm", "update_norm", "param_norm"]
    step = job.step(weighted, weight="mask", metrics=names, ema=0.9)
    state, found = trained(job, step)
    error = lambda params, batch: ((batch["x"] @ params["kernel"] - 1) ** 2).mean(-1)
    evaluated = step.evaluate(state, job.batches(), error)
    return found | {"average": step.model(state, ema=True), "error": evaluated}


def numbered(params: Any, batch: Any) -> jax.Array:
    """What a trace does not decide, and a divisor that is compared by numbers."""
    errors = ((jnp.tanh(batch["x"] @ params["kernel"]) - 1) ** 2).mean(-1)
    like = jax.ShapeDtypeStruct(errors.shape, errors.dtype)
    weights = jax.lax.stop_gradient(
        jax.pure_callback(lambda x: x, like, batch["mask"], vmap_method="expand_dims")
    )
    return (errors * weights * batch["mask"]).sum() / (batch["mask"] != 0).sum()


@feature
def checked_by_numbers(job: Job) -> Any:
    step = job.step(numbered, rule="sgd", weight=lambda batch: (batch["mask"] > 0.5).sum())
    return trained(job, step)[1]


@feature
def trained_part_state_aux_and_entries(job: Job) -> Any:
    def loss(params: Any, state: Any, batch: Any) -> Any:
        rows = jnp.tanh(batch["x"] @ params["kernel"]).mean(-1) * batch["scale"]
        state = {"mean": 0.5 * (state["mean"] + rows.mean())}
        value = ((rows - state["mean"]) ** 2).mean() + ((params["bias"] - 1) ** 2).sum()
        return value, (state, rows.sum())

    step = job.step(
        loss,
        model_state="mean",
        loss_over="shard",
        has_aux=True,
        aux_reduction="sum",
        replicated_entries=("scale",),
        wrt=lambda path, leaf: path[0].key == "kernel",
    )
    state = step.init(START, model_state={"mean": np.float32(0)})
    for batch in job.batches():
        state, metrics = step(state, {"x": batch["x"], "scale": 1.5})
    return {"model": step.model(state), "aux": metrics["aux"]}


def not_finite(action: str, job: Job) -> Any:
    step = job.step(nonfinite=action)
    state, seen = step.init(START), []
    for number, x in enumerate(X):
        whole = x.copy()
        # Of the last shard, and of the only one if there is one.
        whole[-1] = np.nan if number == 1 else whole[-1]
        state, metrics = step(state, {"x": job.own(whole)})
        seen.append(metrics["nonfinite"])
    return {"params": step.unshard(state).params, "seen": seen}


def copies_that_differ(action: str, job: Job) -> Any:
    step = job.step(check_divergence=2, on_divergence=action, weight_update="replicated")
    state, seen, said = step.init(START), [], ""
    # The fourth call after the fault is the one that raises.
    batches = [*job.batches(), *job.batches(), job.batches()[0]]
    for batch in batches[:3]:
        state, _ = step(state, batch)
    # Of two copies none is in the majority.
    if job.shards > 2:
        paths = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(state)]
        faulty = jax.devices()[job.shards - 1]
        if faulty.process_index == job.process:
            fault = lambda x: many_bits(x, np.random.default_rng(0))
            place = paths.index(".params['bias']")
            state = Snapshot.of(state).restored(place, faulty, fault)
    try:
        for batch in batches[3:]:
            state, metrics = step(state, batch)
            seen.append(metrics["divergence"])
    except crossshard.errors.DivergenceError as error:
        said = str(error)
    if said:
        assert f" of process {job.processes - 1})" in said
        said = said.split(" (device")[0]
        return {"seen": seen, "said": np.frombuffer(said.encode(), np.uint8)}
    # The copies differ, so that this process's are not those of all.
    assert action == "repair" or job.shards < 3, "It should have raised."
    copies = {np.asarray(x.data).tobytes() for x in state.params["bias"].addressable_shards}
    assert len(copies) == 1
    return {"seen": seen, "params": step.unshard(state).params}


@feature
def groups(job: Job) -> Any:
    opt = CrossShardOptimizer(RULES["adamw"](), group_assignment=job.groups())
    step = make_train_step(loss_fn, opt, num_shards=job.shards, weight_update="sharded")
    state = step.init(START)
    for batch in job.batches():
        state, _ = step(state, batch)
    return [step.model(state, shard=shard) for shard in range(job.shards)]


@feature
def checkpoint_of_other_options(job: Job) -> Any:
    plain, more = job.step(), job.step(ema=0.5, nonfinite="skip", master_dtype="float32")
    state, _ = plain(plain.init(START, 3), job.batches()[0])
    with Checkpoints(job.folder / "plain", plain) as saved:
        saved.save(state)
    with pytest.warns(crossshard.errors.CheckpointWarning, match="ema is new.*nonfinite is new"):
        found, _ = Checkpoints(job.folder / "plain", more).restore_latest(more.abstract_init(START))
    with pytest.warns(crossshard.errors.CheckpointWarning, match="ema is new.*nonfinite is new"):
        resharded = more.reshard(plain.unshard(state))
    after = [more(each, job.batches()[1]) for each in (found, resharded)]
    _, metrics = plain(state, job.batches()[1])
    assert [float(each["loss"]) for _, each in after] == [float(metrics["loss"])] * 2
    whole = more.unshard(after[0][0])
    return {"params": whole.params, "opt_state": whole.opt_state, "loss": metrics["loss"]}


@feature
def module(job: Job) -> Any:
    loss = lambda net, batch: ((net(batch["x"]) - 1) ** 2).mean()
    step = job.step(loss, loss_over="shard")
    state, found = trained(job, step, Net())
    return found | {"merged": nnx.state(step.model(state))}


# The Optax idiom.


def optax_idiom(rule: str, update: str, job: Job) -> Any:
    mesh, options = job.mesh(), {"preprocess": optax.clip_by_global_norm(1.0)}
    opt = CrossShardOptimizer(RULES[rule](), weight_update=update, **options)
    specs = opt.state_specs(START, job.shards)

    def one(params: Any, state: Any, batch: Any) -> Any:
        loss, grads = crossshard.value_and_grad(loss_fn)(params, batch)
        updates, state = opt.update(grads, state, params)
        return optax.apply_updates(params, updates), state, jax.lax.pmean(loss, "shards")

    put = lambda x, spec: jax.make_array_from_process_local_data(NamedSharding(mesh, spec), x)
    init = jax.jit(jax.shard_map(opt.init, mesh=mesh, in_specs=P(), out_specs=specs))
    step = jax.jit(
        jax.shard_map(
            one, mesh=mesh, in_specs=(P(), specs, P("shards")), out_specs=(P(), specs, P())
        )
    )
    params, losses = jax.tree.map(lambda x: put(x, P()), START), []
    state = init(params)
    for batch in job.batches():
        batch = {"x": put(batch["x"], P("shards"))}
        params, state, loss = step(params, state, batch)
        losses.append(loss)
    return {"params": params, "losses": losses}


@feature
def derivative_of_a_sum_over_groups(job: Job) -> Any:
    over = {"group_assignment": job.groups(), "axis_name": "shards"}
    loss = lambda x: (crossshard.cross_replica_sum(x, **over) ** 2).sum()
    of_all = lambda x: jax.lax.all_gather(jax.grad(loss)(x), "shards")
    mesh = job.mesh()
    run = jax.shard_map(of_all, mesh=mesh, in_specs=P("shards"), out_specs=P(), check_vma=False)
    x = jax.make_array_from_process_local_data(NamedSharding(mesh, P("shards")), job.own(X[0]))
    # Summed in no particular order; whole numbers are not rounded.
    return {"derivative": jax.jit(lambda x: run(jnp.round(8 * x)))(x)}


# The stateful idiom.


class Net(nnx.Module):
    """A model with statistics, and perhaps random streams, which each shard has of its own."""

    def __init__(self, rate: float = 0.0):
        self.norm = nnx.BatchNorm(16, rngs=nnx.Rngs(0))
        self.dropout = nnx.Dropout(rate, rngs=nnx.Rngs(1)) if rate else lambda x: x
        self.linear = nnx.Linear(16, 4, rngs=nnx.Rngs(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear(self.dropout(self.norm(x)))


def runner(job: Job) -> Any:
    @crossshard.shard(num_shards=job.shards)
    def step(model: Any, opt: Any, x: jax.Array) -> Any:
        return opt.minimize(lambda: ((model(x) - 1) ** 2).mean(), var_list=model)

    return step


def linear(seed: int = 0) -> nnx.Linear:
    return nnx.Linear(16, 4, rngs=nnx.Rngs(seed))


def minimized(job: Job, model: Any, opt: Any, batches: Any = X) -> list[jax.Array]:
    """The losses of the steps."""
    step = runner(job)
    return [step(model, opt, job.own(x)).mean() for x in batches]


def stateful(rule: str, job: Job) -> Any:
    model, opt = linear(), CrossShardOptimizer(RULES[rule]())
    losses = minimized(job, model, opt)
    return {"model": nnx.state(model), "state": opt.state, "losses": losses}


@feature
def stateful_stages(job: Job) -> Any:
    options = {"ema": 0.9, "nonfinite": "skip", "preprocess": optax.trace(0.5)}
    model, opt = linear(), CrossShardOptimizer(RULES["sgd"](), accumulate_steps=2, **options)
    losses = minimized(job, model, opt, (*X, X[0]))
    return {"model": nnx.state(model), "inner": opt.state.inner_state, "losses": losses}


@feature
def stateful_module(job: Job) -> Any:
    model, opt = Net(0.5), CrossShardOptimizer(RULES["adamw"]())
    losses = minimized(job, model, opt)
    merged = nnx.state(crossshard.merge_shards(model), nnx.Not(nnx.RngState))
    return {"merged": merged, "losses": losses}


@feature
def stateful_groups(job: Job) -> Any:
    model, opt = linear(), CrossShardOptimizer(RULES["adamw"](), group_assignment=job.groups())
    minimized(job, model, opt)
    return [nnx.state(crossshard.merge_shards(model, shard=k)) for k in range(job.shards)]


@feature
def runners_of_whole_arrays_and_first_outputs(job: Job) -> Any:
    several = crossshard.shard(
        lambda x, table: (x.sum() + table, x * 2),
        num_shards=job.shards,
        input_shard_axes=[1, None],
        outputs_from_all_shards=[False, True],
        output_shard_axes=[0, 1],
        inputs=[job.own(X[0]).T, np.arange(3.0, dtype=np.float32)],
    )
    replicas = [[X[0, k]] for k in range(job.shards)]
    return {
        "first": several[0],
        # Of numbers of both signs, a sum would be rounded by the order of the additions.
        "mean of squares": (several[1] ** 2).mean(),
        "replicas": crossshard.nnx.replicate(lambda x: jax.lax.psum(x, "shards"), replicas),
    }


@feature
def runners_of_processes_that_differ(job: Job) -> Any:
    """Each is refused by name, in every process, before anything is sent."""
    if job.processes == 1:
        return {"refused": np.array(True)}
    step, x = runner(job), job.own(X[0])

    def call(seed: int, rate: float) -> None:
        step(linear(seed), CrossShardOptimizer(optax.sgd(rate)), x)

    with pytest.raises(
        crossshard.errors.ArgumentError, match=r"process 1 passed Param float32\[16,4\]"
    ):
        call(job.process, 0.1)
    # Of the others, each is odd.
    with pytest.raises(crossshard.errors.ProgramMismatchError, match=r"1.* differs?\."):
        call(0, 0.1 * (1 + job.process))
    of_first = crossshard.shard(num_shards=job.devices)(lambda x: x)
    if job.process:
        with pytest.raises(
            crossshard.errors.ArgumentError, match=f"no device of process {job.process}"
        ):
            of_first(x)
    own = crossshard.shard(mesh=Mesh(jax.local_devices(), "shards"))(lambda x: x.sum())
    np.testing.assert_allclose(own(x).sum(), x.sum(), rtol=1e-5)
    return {"refused": np.array(True)}


for _rule in ("sgd", "adamw"):
    feature(stateful, _rule)
    for _update in UPDATES:
        feature(optax_idiom, _rule, _update)
for _action in ("quarantine", "skip"):
    feature(not_finite, _action)
for _action in ("raise", "repair"):
    feature(copies_that_differ, _action)
