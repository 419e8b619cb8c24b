"""The training steps whose compiled programs programs.py compares: one function call each.

Only public names are used, and every state is taken as it comes, so that the same file runs on
both sides of a change.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from optax import contrib

import crossshard

# A case's setup, which returns the step as a function without arguments.
Case = Callable[[], Callable[[], Any]]
CASES: dict[str, Case] = {}
# Devices that are not here: then steps of make_train_step are compiled for them, and not run.
NOT_HERE: list[Any] = []

SHARDS = 8
TWO_GROUPS = [[0, 2, 5, 7], [1, 3, 4, 6]]
FOUR_GROUPS = [[5, 0], [1, 7], [2, 3], [6, 4]]
ROWS, INPUTS = 16, 257


def _normal(shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


# Of all the sizes that are sent in ways of their own: alone and in buckets, in rows and padded,
# whole on every shard.
SHAPES = {
    "embed": (INPUTS, 130),  # above 32,768 elements, whose rows do not divide by 8
    "kernel": (130, 64),
    "wide": (64, 520),  # above 32,768 elements, whose rows divide by 8
    "square": (64, 64),
    "odd": (37, 41),
    "bias": (64,),
    "scale": (),
}
PARAMS = {name: _normal(shape) / 16 for name, shape in SHAPES.items()}
# Enough for weight_update="auto" to split it.
LARGE = {**PARAMS, "large": _normal((520, 300)) / 16}
BATCH = {
    "x": _normal((ROWS, INPUTS)),
    "mask": (np.arange(ROWS) % 3 > 0).astype(np.float32),
}
UNEVEN = {"x": BATCH["x"][:13], "mask": np.ones(13, np.float32)}


def loss_fn(params: Any, batch: Any) -> jax.Array:
    """A small network; leaves besides it are only decayed."""
    hidden = jnp.tanh(batch["x"] @ params["embed"]) @ params["kernel"] + params["bias"]
    hidden = jnp.tanh(hidden @ params["square"] * params["scale"]) @ params["wide"]
    if "large" in params:
        hidden = jnp.tanh(hidden) @ params["large"]
    return ((hidden - 1) ** 2).mean() + (params["odd"] ** 2).mean()


def weighted_loss(params: Any, batch: Any) -> jax.Array:
    """The mean over the rows of the mask."""
    hidden = jnp.tanh(batch["x"] @ params["embed"]) @ params["kernel"] + params["bias"]
    per_row = ((hidden @ params["square"] @ params["wide"]) ** 2).mean(1) * params["scale"]
    decay = (params["odd"] ** 2).mean()
    return (per_row * batch["mask"]).sum() / jnp.maximum(batch["mask"].sum(), 1) + decay


def loss_with_aux(params: Any, batch: Any) -> tuple[jax.Array, Any]:
    """What it returns besides differs between shards."""
    return loss_fn(params, batch), {"mean": batch["x"].mean(), "first": batch["x"][:, 0]}


def loss_with_rng(params: Any, batch: Any, rng: jax.Array) -> jax.Array:
    """With dropout on the inputs."""
    kept = jax.random.bernoulli(rng, 0.9, batch["x"].shape)
    return loss_fn(params, {"x": jnp.where(kept, batch["x"], 0)})


def cast(params: Any, dtype: Any, only: Iterable[str] = tuple(SHAPES)) -> Any:
    """The parameters, some of them in another dtype."""
    return {k: jnp.asarray(v, dtype) if k in only else jnp.asarray(v) for k, v in params.items()}


# With a mask by rank, so that whatever flattens a parameter shows.
def _matrices(params: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9),
    "adamw": lambda: optax.adamw(1e-3),
    "lion": lambda: optax.lion(1e-3),
    "schedule": lambda: optax.adam(optax.cosine_decay_schedule(1e-3, 100)),
    "hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(1e-3),
    "masked": lambda: optax.adamw(1e-3, mask=_matrices),
    "lamb": lambda: optax.lamb(1e-3),
    "clip": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
    "adafactor": lambda: optax.adafactor(1e-3, min_dim_size_to_factor=32),
    "polyak": lambda: optax.polyak_sgd(),
    "momo": lambda: contrib.momo(0.1),
    "finite": lambda: optax.apply_if_finite(optax.adamw(1e-3), 3),
    "multi": lambda: optax.MultiSteps(optax.adamw(1e-3), 2).gradient_transformation(),
}  # fmt: skip


def wrapped(optimizer: str, **kwargs: Any) -> crossshard.CrossShardOptimizer:
    """One of the optimizers, wrapped."""
    return crossshard.CrossShardOptimizer(OPTIMIZERS[optimizer](), **kwargs)


def mesh_of(**axes: int) -> Mesh:
    """A mesh over the first devices."""
    number = int(np.prod(list(axes.values())))
    types = (AxisType.Auto,) * len(axes)
    devices = (NOT_HERE or jax.devices())[:number]
    return jax.make_mesh(tuple(axes.values()), tuple(axes), types, devices=devices)


def add(name: str, make: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Adds a case; what it is given besides the name is for `make`."""
    if name in CASES:
        raise ValueError(f"There are two cases with the name {name}.")
    CASES[name] = functools.partial(make, *args, **kwargs)


# The whole step: make_train_step.


def whole(
    optimizer: str,
    weight_update: str = "auto",
    *,
    loss: Callable[..., Any] = loss_fn,
    params: Any = PARAMS,
    batch: Any = BATCH,
    shards: int = SHARDS,
    axes: dict[str, int] | None = None,
    opt: dict[str, Any] | None = None,
    params_rest: str = "replicated",
    **kwargs: Any,
) -> Callable[[], Any]:
    """A step of make_train_step; `opt` is for the CrossShardOptimizer, bare without it."""
    if params_rest != "replicated":
        kwargs["params"] = params_rest
    if NOT_HERE and axes is None:
        axes = {"shards": shards}
    where = {"num_shards": shards} if axes is None else {"mesh": mesh_of(**axes)}
    rule = OPTIMIZERS[optimizer]() if opt is None else wrapped(optimizer, **opt)
    step = crossshard.make_train_step(loss, rule, weight_update=weight_update, **where, **kwargs)
    given = params() if callable(params) else params
    if NOT_HERE:
        return lambda: step.lower(step.abstract_init(given), batch).compile()
    state = step.init(given)

    def call() -> None:
        nonlocal state
        state, _ = step(state, batch)

    return call


def ways(name: str, pairs: str, **options: Any) -> None:
    """Adds a case for each pair of a weight update and an optimizer, as ``"sharded-adamw"``."""
    for pair in pairs.split():
        weight_update, optimizer = pair.split("-")
        add(
            "-".join(filter(None, ("whole", name, pair))),
            whole,
            optimizer,
            weight_update,
            **options,
        )


# One whose update is replicated, one that is cut into slices, one on global arrays.
_THREE = "replicated-sgd sharded-adamw sharded-clip"
_two, _four = {"group_assignment": TWO_GROUPS}, {"group_assignment": FOUR_GROUPS}
_sum: dict[str, Any] = {"reduction": "sum"}
ways("", "replicated-sgd replicated-adamw replicated-clip replicated-masked replicated-multi")
ways("", "sharded-sgd sharded-momentum sharded-adamw sharded-lion sharded-schedule")
ways("", "sharded-hyperparams sharded-masked")
ways("", "sharded-lamb sharded-clip sharded-adafactor sharded-finite")  # on global arrays
ways("", "auto-adamw")
ways("large", "auto-adamw auto-lamb", params=LARGE)
for _number in (1, 2):
    ways(f"{_number}", "replicated-adamw sharded-momentum sharded-clip", shards=_number)
ways("two-axes", "replicated-adamw sharded-adamw sharded-clip", axes={"slice": 2, "shard": 4})
ways("groups", "replicated-sgd sharded-momentum", opt=_two)
ways("groups", "replicated-clip sharded-adamw", opt=_four)
ways("groups-of-one", "auto-adamw", shards=2, opt={"group_assignment": [[0], [1]]})
ways("one-group", "sharded-adamw", opt={"group_assignment": [[*range(SHARDS)]]})
ways("sum", "replicated-sgd sharded-adamw", opt=_sum)
ways("sum-groups", "sharded-adamw", opt=_sum | _two)
ways("named", "auto-adamw", opt={"name": "a_name", "weight_update": "sharded"})

_mask: dict[str, Any] = {"loss": weighted_loss, "weight": "mask"}
ways("weight", _THREE, **_mask)
ways("weight-padded", "sharded-adamw", batch=UNEVEN, **_mask)
ways("weight-padded-2", "replicated-adamw", batch=UNEVEN, shards=2, **_mask)
ways("weight-1", "auto-adamw", shards=1, **_mask)
ways("weight-groups", "sharded-adamw", opt=_two, **_mask)
_count = lambda batch: batch["mask"].sum()
ways("weight-function", "replicated-sgd", loss=weighted_loss, weight=_count)
_aux: dict[str, Any] = {"loss": loss_with_aux, "has_aux": True}
ways("aux", "replicated-sgd sharded-clip", **_aux)
ways("aux-groups", "sharded-adamw", opt=_two, **_aux)
ways("rng", "replicated-adamw sharded-adamw", loss=loss_with_rng)
ways("rng-1", "auto-sgd", loss=loss_with_rng, shards=1)
ways("value", "replicated-polyak replicated-momo sharded-momo")

_bf16 = functools.partial(cast, PARAMS, jnp.bfloat16)
_f16 = functools.partial(cast, PARAMS, jnp.float16)
_mixed = functools.partial(cast, PARAMS, jnp.bfloat16, ("embed", "odd", "square"))
ways("bf16", _THREE, params=_bf16)
ways("bf16-sum", "replicated-sgd", params=_bf16, opt=_sum)
ways("f16", "replicated-sgd sharded-momentum", params=_f16)
ways("f16-groups", "sharded-momentum", params=_f16, opt=_two)
ways("mixed", "sharded-adamw replicated-adamw", params=_mixed)


# The stages that are optional, one by one and together.

_kept: dict[str, Any] = {"params": _bf16, "master_dtype": "float32", "ema": 0.99}
_clip_shard: dict[str, Any] = {"opt": {"preprocess": optax.clip_by_global_norm(1.0)}}
_most: dict[str, Any] = {"nonfinite": "skip", "accumulate_steps": 2, "metrics": "grad_norm"}
ways("quarantine", _THREE, nonfinite="quarantine")
ways("quarantine-groups", "sharded-sgd", opt=_two, nonfinite="quarantine")
ways("quarantine-weight", "sharded-adamw", nonfinite="quarantine", **_mask)
ways("skip", _THREE, nonfinite="skip")
ways("scale", _THREE, params=_f16, loss_scale="dynamic")
ways("accumulate", _THREE, accumulate_steps=2)
ways("metrics", _THREE, metrics=["grad_norm", "noise_scale"])
ways("masters", "replicated-momentum sharded-adamw", **_kept)
ways("masters-groups", "sharded-adamw", opt=_two, **_kept)
ways("wire", "sharded-adamw", reduce_dtype="bfloat16")
ways("preprocess", "replicated-sgd sharded-adamw", **_clip_shard)
ways("most", "replicated-adamw sharded-adamw", **_most | _clip_shard | _kept)
ways("most", "sharded-clip", **_most | _kept)


# What a loss is over, where parameters rest, few bits, workers, and what is compared.


def mean_of_sums(params: Any, batch: Any) -> crossshard.Mean:
    """Two terms that count differently."""
    hidden = jnp.tanh(batch["x"] @ params["embed"])
    per_row = ((hidden @ params["kernel"]) ** 2).mean(1)
    of_mask = crossshard.Mean((per_row * batch["mask"]).sum(), batch["mask"].sum(), "masked")
    return of_mask + 0.1 * crossshard.Mean((hidden**2).mean(1).sum(), batch["x"].shape[0])


_OVER = "sharded-sgd sharded-adamw sharded-clip"
_parts: dict[str, Any] = {"params_rest": "sharded"}
ways("parts", "auto-sgd auto-adamw auto-clip", **_parts)
ways("parts-quarantine", "auto-adamw", nonfinite="quarantine", **_parts)
ways("parts-int8", "auto-adamw", reduce_dtype="int8", **_parts)
ways("batch", _OVER, loss_over="batch")
ways("virtual", _OVER, virtual_shards=16)
ways("sums", _OVER, loss=mean_of_sums)
ways("compared", _OVER, check_divergence=2)
ways("repaired", "sharded-adamw", check_divergence=2, on_divergence="repair")
ways("int8", "replicated-sgd", reduce_dtype="int8")
ways("int4", "sharded-adamw", reduce_dtype="int4")
ways("int8-quarantine", "sharded-adamw", reduce_dtype="int8", nonfinite="quarantine")
_outer: dict[str, Any] = {"sync_every": 4, "outer_optimizer": optax.sgd(0.7, momentum=0.9)}
ways("workers", "auto-adamw", **_outer)
ways("workers-groups", "sharded-adamw", opt=_two, **_outer)
ways("workers-int8", "auto-adamw", outer_reduce_dtype="int8", **_outer)
ways("workers-skip", "auto-adamw", nonfinite="skip", **_outer)
ways("streaming", "auto-adamw", sync_streaming=True, **_outer)
ways("streaming-groups", "sharded-adamw", opt=_two, sync_streaming=True, **_outer)


def split_over_a_model_axis() -> Any:
    """The parameters, some of them split over another axis of the mesh."""
    mesh = mesh_of(**_with_a_model["axes"])
    split = {"embed": P(None, "model"), "kernel": P("model")}
    place = lambda name: NamedSharding(mesh, split.get(name, P()))
    return {name: jax.device_put(value, place(name)) for name, value in PARAMS.items()}


_with_a_model: dict[str, Any] = {
    "axes": {"shard": 4, "model": 2},
    "axis_name": "shard",
    "params": split_over_a_model_axis,
}
ways("model-axis", _THREE, **_with_a_model)
ways("model-axis-skip", "sharded-clip", nonfinite="skip", **_with_a_model)


# Modules.


class Net(nnx.Module):
    """With all that a module has besides parameters: statistics, random streams, a count."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(INPUTS, 130, rngs=rngs)
        self.norm = nnx.BatchNorm(130, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.last = nnx.Linear(130, 24, rngs=rngs)
        self.calls = nnx.Variable(jnp.array(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.calls[...] += 1
        return self.last(self.dropout(jax.nn.relu(self.norm(self.first(x)))))


def net_loss(net: Any, batch: Any) -> jax.Array:
    """The mean over the rows."""
    return ((net(batch["x"]) - 1) ** 2).mean()


def weighted_net_loss(net: Any, batch: Any) -> jax.Array:
    """The mean over the rows of the mask."""
    per_row = ((net(batch["x"]) - 1) ** 2).mean(1)
    return (per_row * batch["mask"]).sum() / jnp.maximum(batch["mask"].sum(), 1)


class Layers(eqx.Module):
    """With leaves that are not trained: integers, a setting, a function."""

    embed: jax.Array
    order: jax.Array
    mlp: eqx.nn.MLP
    scale: float

    def __init__(self) -> None:
        key = jax.random.key(0)
        self.embed = jax.random.normal(key, (INPUTS, 136)) / 16
        self.order = jnp.arange(136)[::-1]
        self.mlp = eqx.nn.MLP(136, 3, 64, 2, key=key)
        self.scale = 0.5

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.scale * jax.vmap(self.mlp)((x @ self.embed)[:, self.order])


# Each shard has its own statistics.
_net: dict[str, Any] = {"loss": net_loss, "params": Net, "loss_over": "shard"}
ways("nnx", _THREE, **_net)
ways("nnx-groups", "sharded-adamw", opt=_two, **_net)
ways("nnx-1", "auto-adamw", shards=1, **_net)
ways("nnx-2", "sharded-adamw", shards=2, **_net)
ways("nnx-weight", "sharded-adamw", **_mask | _net | {"loss": weighted_net_loss})
ways("equinox", "replicated-sgd sharded-adamw sharded-lamb", loss=net_loss, params=Layers)


# The Optax idiom, in the modes of JAX.


def _stacked(tree: Any, number: int) -> Any:
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (number, *jnp.shape(x))), tree)


def _own(tree: Any) -> Any:
    return jax.tree.map(lambda x: x[0], tree)


def _of_all(tree: Any) -> Any:
    return jax.tree.map(lambda x: x[None], tree)


def _over(mode: str, shards: int) -> Mesh:
    return mesh_of(slice=2, shard=shards // 2) if "two axes" in mode else mesh_of(shards=shards)


def update_of(
    opt: Any,
    value_and_grad: Callable[..., Any] = crossshard.value_and_grad,
    value: bool = False,
    **kwargs: Any,
) -> Callable[..., Any]:
    """The step of one shard, as users of Optax write it."""

    def update(params: Any, state: Any, x: jax.Array) -> Any:
        loss, grads = value_and_grad(loss_fn)(params, {"x": x})
        extra = {"value": loss} if value else {}
        updates, state = opt.update(grads, state, params, **extra, **kwargs)
        return optax.apply_updates(params, updates), state

    return update


def idiom(
    mode: str,
    optimizer: str = "adamw",
    *,
    params: Any = PARAMS,
    shards: int = SHARDS,
    chain: bool = False,
    opt: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Callable[[], Any]:
    """A step of the Optax idiom; `kwargs` are for `update_of`, `opt` for the optimizer."""
    opt = opt or {}
    if "two axes" in mode:
        axes: Any = {"axis_name": ("slice", "shard")}
        opt = axes | opt
        kwargs = {"value_and_grad": functools.partial(crossshard.value_and_grad, **axes)} | kwargs
    made: Any = wrapped(optimizer, **opt)
    if chain:
        made = optax.chain(optax.clip(1.0), made)
    params = jax.tree.map(jnp.asarray, params() if callable(params) else params)
    update = update_of(made, **kwargs)
    of_shards = lambda: (_stacked(params, shards), _stacked(made.init(params), shards))
    if mode in ("vmap", "pmap"):
        x = BATCH["x"].reshape(shards, -1, INPUTS)
        run = jax.pmap(update, "shards")
        if mode == "vmap":
            run = jax.jit(jax.vmap(update, axis_name="shards"))
        return functools.partial(run, *of_shards(), x)
    mesh = _over(mode, shards)
    each, check_vma = P(mesh.axis_names), "unchecked" not in mode
    shard_map = functools.partial(jax.shard_map, mesh=mesh, check_vma=check_vma)
    placed = lambda tree, spec: jax.device_put(tree, NamedSharding(mesh, spec))
    apart = "group_assignment" in opt
    if apart:
        alone = update
        update = lambda p, s, x: _of_all(alone(_own(p), _own(s), x))
    lie = each if apart else P()
    if opt.get("weight_update") == "sharded":
        specs = made.state_specs(params, shards, mesh.axis_names)
        state = jax.jit(shard_map(made.init, in_specs=P(), out_specs=specs))(params)
        if apart:
            update = lambda p, s, x: _of_all_but_state(alone(_own(p), s, x))
            params = _stacked(params, shards)
    else:
        specs = lie
        params, state = of_shards() if apart else (params, made.init(params))
        state = placed(state, lie)
    run = shard_map(update, in_specs=(lie, specs, each), out_specs=(lie, specs))
    return functools.partial(jax.jit(run), placed(params, lie), state, placed(BATCH["x"], each))


def _of_all_but_state(both: tuple[Any, Any]) -> tuple[Any, Any]:
    return _of_all(both[0]), both[1]


MODES = {
    "checked": "shard_map, check_vma=True",
    "unchecked": "shard_map, check_vma=False",
    "vmap": "vmap(axis_name)",
    "pmap": "pmap",
    "two axes": "shard_map over a mesh of two axes",
}
for _mode in MODES:
    _name = f"optax-{_mode.replace(' ', '-')}"
    add(f"{_name}-mean-sgd", idiom, _mode, "sgd")
    add(f"{_name}-mean-adamw", idiom, _mode)
    add(f"{_name}-sum-momentum", idiom, _mode, "momentum", opt=_sum)
    add(f"{_name}-groups", idiom, _mode, opt=_two)
    add(f"{_name}-value-momo", idiom, _mode, "momo", value=True)
    add(f"{_name}-bf16", idiom, _mode, params=_bf16)
add("optax-checked-clip", idiom, "checked", "clip")
add("optax-checked-chain", idiom, "checked", chain=True)
add("optax-checked-f16", idiom, "checked", "momentum", params=_f16)
add("optax-unchecked-groups-clip", idiom, "unchecked", "clip", opt=_four)
add("optax-unchecked-two-axes", idiom, "two axes, unchecked")
add("optax-checked-groups-sum", idiom, "checked", "sgd", opt=_sum | _four)
for _number in (1, 2):
    add(f"optax-checked-mean-{_number}", idiom, "checked", shards=_number)
    add(f"optax-unchecked-mean-{_number}", idiom, "unchecked", shards=_number)
_jax = {"value_and_grad": jax.value_and_grad}
for _mode in ("checked", "two axes"):
    _name = f"optax-{_mode.replace(' ', '-')}"
    add(f"{_name}-summed-mean", idiom, _mode, **_jax, incoming="summed")
    add(f"{_name}-summed-sum", idiom, _mode, opt=_sum, **_jax, incoming="summed")
    add(f"{_name}-reduced", idiom, _mode, opt={"incoming": "reduced"}, **_jax)
add("optax-unchecked-scaled", idiom, "unchecked", incoming="scaled")
add("optax-unchecked-local", idiom, "unchecked", **_jax, opt={"incoming": "local"})
_sharded = {"weight_update": "sharded"}
for _mode in ("checked", "unchecked", "two axes"):
    _name = f"optax-{_mode.replace(' ', '-')}-sharded"
    add(f"{_name}-momentum", idiom, _mode, "momentum", opt=_sharded)
    add(f"{_name}-adamw", idiom, _mode, opt=_sharded)
_of_groups = PARAMS | {"scale": np.ones(1, np.float32)}
add("optax-unchecked-sharded-groups", idiom, "unchecked", params=_of_groups, opt=_sharded | _two)
add("optax-unchecked-sharded-sum-2", idiom, "unchecked", shards=2, opt=_sharded | _sum)
add("optax-unchecked-sharded-bf16", idiom, "unchecked", params=_bf16, opt=_sharded)


def nnx_optimizer(optimizer: str, runner: bool = False) -> Callable[[], Any]:
    """nnx.Optimizer around ours, under nnx.shard_map or in a runner."""
    net = Net()
    opt = nnx.Optimizer(net, wrapped(optimizer), wrt=nnx.Param)

    def step(net: Net, opt: nnx.Optimizer, x: jax.Array) -> None:
        opt.update(net, crossshard.grad(lambda net: net_loss(net, {"x": x}))(net))

    if runner:
        return functools.partial(crossshard.shard(num_shards=SHARDS)(step), net, opt, BATCH["x"])
    # Statistics differ between shards, which this mode cannot hand out; evaluation leaves them.
    net.eval()
    specs = (P(), P(), P("shards"))
    run = nnx.shard_map(step, mesh=mesh_of(shards=SHARDS), in_specs=specs, out_specs=P())
    return functools.partial(nnx.jit(run), net, opt, jnp.asarray(BATCH["x"]))


add("optax-nnx-optimizer", nnx_optimizer, "adamw")
add("optax-nnx-optimizer-in-a-runner", nnx_optimizer, "adamw", runner=True)


# The stateful idiom, in the runners.


class Params(nnx.Module):
    """PARAMS as variables."""

    def __init__(self, dtype: Any = jnp.float32) -> None:
        for name, value in PARAMS.items():
            setattr(self, name, nnx.Param(jnp.asarray(value, dtype)))

    def loss(self, x: jax.Array) -> jax.Array:
        """`loss_fn` of them."""
        return loss_fn({name: getattr(self, name)[...] for name in PARAMS}, {"x": x})


def minimized(model: Any, opt: Any, step: Any, x: jax.Array) -> Any:
    """The shortest."""
    del step
    return opt.minimize(lambda: model.loss(x), var_list=model)


def counted(model: Any, opt: Any, step: Any, x: jax.Array) -> Any:
    """With a count of steps, and names."""
    return opt.minimize(lambda: model.loss(x), step, model, name="a_name")


def clipped(model: Any, opt: Any, step: Any, x: jax.Array) -> Any:
    """In two calls, with each shard's gradient clipped between them."""
    del step
    pairs = opt.compute_gradients(lambda: model.loss(x), var_list=model)
    norm = optax.global_norm([gradient for gradient, _ in pairs])
    opt.apply_gradients([(g / jnp.maximum(norm, 1), v) for g, v in pairs])


def listed(model: Any, opt: Any, step: Any, x: jax.Array) -> Any:
    """Some of the variables, and a scaled loss."""
    del step
    chosen = [model.kernel, model.embed, model.bias]
    opt.minimize(lambda: model.loss(x), var_list=chosen, grad_loss=jnp.float32(2))


def given(model: Any, opt: Any, step: Any, x: jax.Array) -> Any:
    """With gradients from elsewhere."""
    del step
    gradients = crossshard.grad(lambda embed: (jnp.tanh(x @ embed) ** 2).mean())(model.embed[...])
    opt.apply_gradients([(gradients, model.embed)], incoming="local")


def trained(model: Any, opt: Any, step: Any, x: jax.Array) -> Any:
    """A module with statistics and random streams, and a metric of all shards."""
    loss = opt.minimize(lambda: net_loss(model, {"x": x}), step, model)
    return crossshard.cross_replica_sum(loss) / SHARDS


def stateful(
    optimizer: str,
    body: Callable[..., Any] = minimized,
    *,
    model: Callable[[], Any] = Params,
    shards: int = SHARDS,
    axes: dict[str, int] | None = None,
    runner: Callable[..., Any] = crossshard.shard,
    build: bool = False,
    **kwargs: Any,
) -> Callable[[], Any]:
    """A step of the stateful idiom; `kwargs` are for the optimizer."""
    module, opt, step = model(), wrapped(optimizer, **kwargs), nnx.Variable(jnp.array(0))
    if build:
        opt.build(module)
    where: Any = {"num_shards": shards} if axes is None else {"mesh": mesh_of(**axes)}
    return functools.partial(runner(**where)(body), module, opt, step, BATCH["x"])


for _optimizer in ("sgd", "momentum", "adamw", "clip", "lamb", "masked", "momo"):
    add(f"stateful-{_optimizer}", stateful, _optimizer)
for _number in (1, 2):
    add(f"stateful-adamw-{_number}", stateful, "adamw", shards=_number)
add("stateful-built", stateful, "adamw", build=True)
add("stateful-sum", stateful, "momentum", reduction="sum")
add("stateful-global-step", stateful, "adamw", counted)
add("stateful-clipped", stateful, "adamw", clipped)
add("stateful-clipped-2", stateful, "sgd", clipped, shards=2)
add("stateful-clipped-sum", stateful, "sgd", clipped, reduction="sum")
add("stateful-some-variables", stateful, "adamw", listed)
add("stateful-gradients-from-elsewhere", stateful, "momentum", given)
add("stateful-groups", stateful, "adamw", group_assignment=TWO_GROUPS)
add("stateful-groups-clipped", stateful, "sgd", clipped, group_assignment=FOUR_GROUPS)
add("stateful-two-axes", stateful, "adamw", axes={"slice": 2, "shard": 4})
add("stateful-batch-parallel", stateful, "adamw", runner=crossshard.nnx.batch_parallel)
add("stateful-bf16", stateful, "adamw", model=functools.partial(Params, jnp.bfloat16))
add("stateful-f16", stateful, "sgd", model=functools.partial(Params, jnp.float16))
add("stateful-quarantine", stateful, "sgd", nonfinite="quarantine")
add("stateful-skip", stateful, "adamw", nonfinite="skip")
add("stateful-ema", stateful, "adamw", ema=0.99)
add("stateful-accumulate", stateful, "momentum", accumulate_steps=2)
add("stateful-preprocess", stateful, "sgd", preprocess=optax.clip_by_global_norm(1.0))
add("stateful-wire", stateful, "momentum", reduce_dtype="bfloat16")
add("stateful-metrics", stateful, "adamw", metrics=["grad_norm", "noise_scale"])
add("stateful-nnx", stateful, "adamw", trained, model=Net)
add("stateful-nnx-groups", stateful, "sgd", trained, model=Net, group_assignment=TWO_GROUPS)
add("stateful-nnx-1", stateful, "sgd", trained, model=Net, shards=1)


# Collectives by themselves.


def summed(mode: str, groups: Any = None, gradient: bool = False) -> Callable[[], Any]:
    """cross_replica_sum, or its gradient."""

    axis_name = ("slice", "shard") if "two axes" in mode else None

    def total(x: jax.Array) -> jax.Array:
        return crossshard.cross_replica_sum(jnp.sin(x) + 1, groups, axis_name=axis_name)

    function = jax.grad(lambda x: (total(x) ** 2).sum()) if gradient else total
    x = BATCH["x"]
    if mode == "runner":
        return functools.partial(crossshard.shard(num_shards=SHARDS)(function), x)
    if mode in ("vmap", "pmap"):
        by_vmap = jax.jit(jax.vmap(function, axis_name="shards"))
        run = by_vmap if mode == "vmap" else jax.pmap(function, "shards")
        return functools.partial(run, x.reshape(SHARDS, -1, INPUTS))
    mesh = _over(mode, SHARDS)
    spec, check_vma = P(mesh.axis_names), "unchecked" not in mode
    run = jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma)
    return functools.partial(jax.jit(run), x)


for _mode in (*MODES, "runner"):
    _name = f"sum-{_mode.replace(' ', '-')}"
    add(_name, summed, _mode)
    add(f"{_name}-groups", summed, _mode, FOUR_GROUPS)
    add(f"{_name}-gradient", summed, _mode, TWO_GROUPS, gradient=True)


def exchanged() -> Callable[[], Any]:
    """Values sent between shards, beside a sum."""

    def exchange(x: jax.Array) -> Any:
        ring = [[shard, (shard + 1) % SHARDS] for shard in range(SHARDS)]
        moved = crossshard.collective_permute(jnp.sin(x), ring)
        return (
            moved,
            crossshard.all_to_all(jnp.cos(x.T[:256]), 1, 0, SHARDS),
            lax.axis_index("shards"),
        )

    return functools.partial(crossshard.shard(num_shards=SHARDS)(exchange), BATCH["x"])


add("exchange", exchanged)
