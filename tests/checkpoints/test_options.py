"""Options that are added to a trained run, taken away or changed: what a checkpoint does then."""

import functools
import itertools
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from crossshard import Checkpoints, CrossShardOptimizer, Reduction, make_train_step
from crossshard.errors import (
    ArgumentError,
    CheckpointMismatchError,
    CheckpointWarning,
)
from crossshard.pipeline import DynamicLossScale
from examples.top_k import TopK
from tests.checkpoints.common import arrays, check_same_bits, edit
from tests.quick import deep_but

RNG = np.random.default_rng(0)
W = np.float32(RNG.normal(size=(37, 16)) / 4)
XS = np.float32(RNG.normal(size=(8, 16, 37)))
OUTER = optax.sgd(0.7, momentum=0.9)
OPTIMIZERS = {"sgd": lambda: optax.sgd(0.1, momentum=0.9), "adam": lambda: optax.adam(0.01)}


def loss_fn(params: Any, x: Any) -> jax.Array:
    return ((jnp.tanh(x @ params["w"].astype(jnp.float32)) - 1) ** 2).mean()


def params(dtype: Any = jnp.float32) -> Any:
    return {"w": jnp.asarray(W, dtype)}


@functools.cache
def step_with(optimizer: Any = "sgd", shards: int = 2, **options: Any) -> Any:
    of_wrapper = {
        name: options.pop(name) for name in ("preprocess", "reduction") if name in options
    }
    if "groups" in options:
        # Lists, which a cache does not take.
        of_wrapper["group_assignment"] = [list(group) for group in options.pop("groups")]
    inner = OPTIMIZERS[optimizer]() if isinstance(optimizer, str) else optimizer
    wrapped = CrossShardOptimizer(inner, **of_wrapper)
    options = {"weight_update": "sharded", **options}
    return make_train_step(loss_fn, wrapped, num_shards=shards, **options)


def trained(step: Any, steps: int = 2, dtype: Any = jnp.float32) -> Any:
    state = step.init(params(dtype))
    for x in XS[:steps]:
        state, _ = step(state, x)
    return state


def saved(folder: Path, step: Any, state: Any = None) -> Any:
    """A state, of which there is a checkpoint; the first one unless another is given."""
    state = step.init(params()) if state is None else state
    with Checkpoints(folder, step) as checkpoints:
        checkpoints.save(state)
    return state


def restored(
    folder: Path, step: Any, dtype: Any = jnp.float32, *, says: str | None = None, **how: Any
) -> Any:
    """The restored state; what the warning says must match, and nothing may be said if ``None``."""
    like = step.abstract_init(params(dtype))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        state, _ = Checkpoints(folder, step).restore_latest(like, **how)
    told = [str(each.message) for each in caught if each.category is CheckpointWarning]
    if says is None:
        assert not told
    else:
        assert len(told) == 1, told
        assert all(part in told[0] for part in says.split("…")), told[0]
    # As compiled: no second program, and the same placement.
    for x, own in zip(jax.tree.leaves(state), jax.tree.leaves(like), strict=True):
        assert (x.shape, x.dtype) == (own.shape, own.dtype)
        assert x.sharding.is_equivalent_to(own.sharding, x.ndim)
    return state


def on_one_device(optimizer: Any, state: Any, xs: Any) -> Any:
    """What Optax alone makes of the parameters and the state of the wrapped optimizer."""
    host = lambda tree: jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), tree)
    own, inner = host(state.params), host(state.opt_state.inner_state)
    for x in xs:
        updates, inner = optimizer.update(jax.grad(loss_fn)(own, x), inner, own)
        own = optax.apply_updates(own, updates)
    return own["w"]


def go_on(step: Any, state: Any) -> Any:
    for x in XS[2:6]:
        state, metrics = step(state, x)
    return state, metrics


# Options that are added to a run, and taken away.

ADDED: dict[str, tuple[dict[str, Any], str]] = {
    "nonfinite": ({"nonfinite": "skip"}, "nonfinite is new, and its state is made anew"),
    "metrics": ({"metrics": ("grad_norm",)}, "metrics is new"),
    "ema": ({"ema": 0.9}, "ema is new, and its state is made from the parameters"),
    "loss_scale": ({"loss_scale": "dynamic"}, "loss_scale is new"),
    "master_dtype": ({"master_dtype": "float32"}, "master_dtype is new"),
    "preprocess": ({"preprocess": optax.trace(0.0)}, "preprocess is new"),
    "stateless": ({"preprocess": optax.clip_by_global_norm(1e9)}, "preprocess is off in it"),
    "accumulate_steps": ({"accumulate_steps": 4}, "accumulate_steps is 1 in it, and 4 here"),
    "several": (
        {"ema": 0.9, "master_dtype": "float32", "nonfinite": "skip", "metrics": "grad_norm"},
        "ema is new…master_dtype is new…metrics is new…nonfinite is new",
    ),
}
AND_BACK = {
    "is new, and its state is made anew": "is gone, and its state is dropped",
    "is 1 in it, and 4": "is 4 in it, and 1",
    "is new": "is gone",
    "made from the parameters": "dropped",
    "off in it": "on in it",
}


@pytest.mark.parametrize(
    ("name", "optimizer", "update"),
    deep_but(
        [("nonfinite", "sgd", "sharded")],
        itertools.product(ADDED, OPTIMIZERS, ["sharded", "replicated"]),
    ),
)
def test_an_option_is_added_and_taken_away(name: str, optimizer: str, update: str, tmp_path: Path):
    options, says = ADDED[name]
    plain = step_with(optimizer, weight_update=update)
    state = saved(tmp_path / "plain", plain, trained(plain))
    want = on_one_device(OPTIMIZERS[optimizer](), plain.unshard(state), XS[2:6])
    step = step_with(optimizer, weight_update=update, **options)
    found, metrics = go_on(step, restored(tmp_path / "plain", step, says=says))
    np.testing.assert_allclose(found.params["w"], want, rtol=0, atol=1e-6)
    assert int(found.step) == 6
    if "metrics" in options:
        assert float(metrics["grad_norm"]) > 0
    # In memory it is the same.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        resharded = step.reshard(plain.unshard(state))
    again = restored(tmp_path / "plain", step, says=says)
    check_same_bits(arrays(step, resharded), arrays(step, again))
    # And back.
    saved(tmp_path / "with", step, found)
    for new, gone in AND_BACK.items():
        says = says.replace(new, gone)
    back, _ = go_on(plain, restored(tmp_path / "with", plain, says=says))
    once_more = plain.init(params())
    for x in (*XS[:6], *XS[2:6]):
        once_more, _ = plain(once_more, x)
    np.testing.assert_allclose(back.params["w"], once_more.params["w"], rtol=0, atol=2e-6)


def test_masters_of_16_bits_are_made_from_the_parameters_and_dropped(tmp_path: Path):
    half = jnp.bfloat16
    plain, wide = step_with("adam"), step_with("adam", master_dtype="float32")
    state = saved(tmp_path / "plain", plain, trained(plain, dtype=half))
    found = restored(tmp_path / "plain", wide, half, says="master_dtype is new")
    inner = wide.unshard(found).opt_state.inner_state
    np.testing.assert_array_equal(inner.masters["w"], np.float32(state.params["w"]))
    # The moments are as wide as the masters, and the same numbers.
    was = plain.unshard(state).opt_state.inner_state[0]
    assert (was.mu["w"].dtype, inner.inner_state[0].mu["w"].dtype) == (half, jnp.float32)
    np.testing.assert_array_equal(inner.inner_state[0].mu["w"], np.float32(was.mu["w"]))
    found, _ = go_on(wide, found)
    saved(tmp_path / "wide", wide, found)
    back = restored(tmp_path / "wide", plain, half, says="master_dtype is gone")
    np.testing.assert_array_equal(np.float32(back.params["w"]), np.float32(found.params["w"]))
    go_on(plain, back)
    # An average that is added to masters starts at them, with all of their bits.
    both = step_with("adam", master_dtype="float32", ema=0.9)
    inner = both.unshard(restored(tmp_path / "wide", both, half, says="ema is new")).opt_state
    masters = inner.inner_state.masters["w"]
    np.testing.assert_array_equal(inner.inner_state.inner_state.ema["w"], masters)
    assert not np.array_equal(masters, masters.astype(half))


def test_on_other_shards_and_with_groups(tmp_path: Path):
    four, two = step_with(shards=4), step_with(ema=0.5, preprocess=optax.trace(0.5))
    state = saved(tmp_path / "four", four, trained(four))
    found = restored(tmp_path / "four", two, says="ema is new…preprocess is new")
    np.testing.assert_array_equal(two.unshard(found).params["w"], state.params["w"])
    assert two.unshard(found).opt_state.preprocess.trace["w"].shape == (2, *W.shape)
    go_on(two, found)
    groups = ((0, 1), (2, 3))
    plain = step_with(shards=4, groups=groups)
    more = step_with(shards=4, groups=groups, ema=0.5, metrics="grad_norm")
    state = saved(tmp_path / "groups", plain, trained(plain))
    found = restored(tmp_path / "groups", more, says="ema is new…metrics is new")
    for shard in (0, 3):
        np.testing.assert_array_equal(
            more.model(found, shard, ema=True)["w"], state.params["w"][shard]
        )
    go_on(more, found)


def test_what_is_kept_is_not_said_to_be_gone(tmp_path: Path):
    one, other = step_with(metrics=("grad_norm",)), step_with(metrics=("param_norm", "grad_norm"))
    saved(tmp_path, one)
    restored(tmp_path, other, says="metrics keeps other arrays: new ones are made anew")
    restored(tmp_path, step_with(metrics="update_norm"), says="metrics keeps other arrays")
    rarely = {"sync_every": 2, "weight_update": "replicated"}
    plain = step_with(outer_optimizer=OUTER, **rarely)
    few = step_with(outer_optimizer=OUTER, outer_reduce_dtype="int8", **rarely)
    anchor_of = lambda step, state: step.unshard(state).opt_state.outer.anchor["w"]
    for one, other, says in (
        (plain, few, "outer keeps other arrays: new ones are made anew"),
        (few, plain, "outer keeps other arrays: new ones are made anew, others dropped"),
    ):
        folder = tmp_path / says[-14:]
        state = saved(folder, one, trained(one))
        found = restored(folder, other, says=says)
        np.testing.assert_array_equal(anchor_of(other, found), anchor_of(one, state))
        with pytest.warns(CheckpointWarning, match=says):
            other.reshard(one.unshard(state))


# What changes the meaning of a step, and other numbers.

inner = lambda optimizer: {"optimizer": optimizer}
before = lambda stage: {"preprocess": stage}
outer = lambda optimizer: {"sync_every": 2, "outer_optimizer": optimizer}
adam, sgd, linear = optax.adam, optax.sgd, optax.linear_schedule
parts = {"params": "sharded"}
scale = lambda growth, **more: {"loss_scale": DynamicLossScale(growth_factor=growth, **more)}
# Of two steps, what a restore says of the first one's checkpoint; refused unless strict=False.
REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"reduction": Reduction.SUM}, "reduction is MEAN in it, and SUM here"),
    (
        before(optax.clip_by_global_norm(1.0)),
        before(optax.clip(1.0)),
        "its preprocess has a state of the same kind.* it has square.* in clip_by_global_norm",
    ),
    (
        before(optax.trace(0.5)),
        before(optax.scale_by_rms(0.5)),
        "its preprocess's state is TraceState in it, and ScaleByRmsState here",
    ),
    (
        inner(optax.adamw(0.1, weight_decay=0.1)),
        inner(optax.adamw(0.1, weight_decay=0)),
        r"update differ .* it has mul\(0\.1, x\) of float32 in add_decayed_weights, and this one",
    ),
    (
        inner(sgd(linear(0.1, 0, 100))),
        inner(sgd(optax.cosine_decay_schedule(0.1, 100))),
        r"update differ.* in scale_by_schedule, and this one .* in scale_by_schedule",
    ),
    (
        outer(OUTER),
        outer(sgd(0.7, momentum=0.9, nesterov=True)),
        "its outer_optimizer has a state of the same kind, but the operations",
    ),
]
# Numbers, and what does not change the meaning: only said.
SAID: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (
        inner(adam(0.1)),
        inner(adam(0.1, b1=0.5)),
        "it has mul(0.1, x) of float32 in scale_by_adam, and this one mul(0.5, x)",
    ),
    (before(optax.clip(1.0)), before(optax.clip(2.0)), "numbers in the update of its preprocess"),
    ({"ema": 0.9}, {"ema": 0.5}, "ema is 0.9 in it, and 0.5 here"),
    (
        outer(OUTER),
        outer(sgd(0.5, momentum=0.9)),
        "update of its outer_optimizer differ: it has mul(-0.7, x)…, and this one mul(-0.5, x)",
    ),
    (parts, parts | {"gather_dtype": "int8"}, "gather_dtype is off in it, and int8 here"),
    ({"aggregator": TopK(0.1)}, {"aggregator": TopK(0.2)}, "aggregator.part is 0.1 in it, and 0.2"),
    ({}, {"loss_over": "shard"}, "loss_over is rows in it, and shard here"),
    (
        scale(2.0),
        scale(4.0, backoff_factor=0.25),
        "loss_scale.backoff_factor is 0.5 in it, and 0.25 here; loss_scale.growth_factor is 2.0",
    ),
]


@pytest.mark.parametrize(
    ("was", "now", "says"), [*REFUSED, *SAID], ids=[says[:24] for *_, says in (*REFUSED, *SAID)]
)
def test_what_differs_is_refused_or_said_by_name(was: Any, now: Any, says: str, tmp_path: Path):
    old, new = step_with(**was), step_with(**now)
    state = saved(tmp_path, old)
    check_same_bits(arrays(old, restored(tmp_path, old)), arrays(old, state))
    is_refused = (was, now, says) in REFUSED
    if is_refused:
        with pytest.raises(CheckpointMismatchError, match=f"(?s){says}.*strict=False"):
            restored(tmp_path, new)
        says = "is of a step that differs"
    found = restored(tmp_path, new, strict=not is_refused, says=says)
    np.testing.assert_array_equal(new.unshard(found).params["w"], old.unshard(state).params["w"])


def masked(first: bool) -> Any:
    return optax.add_decayed_weights(0.5, mask={"v": first, "w": not first})


def labelled(v: str, w: str) -> Any:
    return optax.partition({"slow": sgd(0.001), "fast": sgd(0.1)}, {"v": v, "w": w})


def tabled(rate: float) -> Any:
    table = np.linspace(rate, 0, 10, dtype=np.float32)
    return sgd(lambda count: jnp.asarray(table)[jnp.minimum(count, 9)])


def of_columns(rate: float) -> Any:
    rates = np.full(16, 0.1, np.float32)
    rates[3] = rate
    of_one = lambda x: x * jnp.asarray(rates)
    return optax.stateless(lambda updates, _: jax.tree.map(of_one, updates))


def of_rows(start: int) -> Any:
    of_one = lambda x: x - x[start : start + 4].sum(0)
    return optax.stateless(lambda updates, _: jax.tree.map(of_one, updates))


# Two optimizers of the same operations and numbers, of two arrays of one shape.
TWINS: dict[str, tuple[Any, Any, bool]] = {
    "a mask": (masked(True), masked(False), True),
    "labels": (labelled("slow", "fast"), labelled("fast", "slow"), True),
    "a table of rates": (tabled(0.1), tabled(0.2), False),
    "a rate of each column": (of_columns(0.1), of_columns(0.2), False),
    "other rows": (of_rows(1), of_rows(2), False),
}


@pytest.mark.parametrize("name", TWINS)
def test_the_same_operations_of_other_arrays_are_not_the_same(name: str, tmp_path: Path):
    *pair, is_refused = TWINS[name]
    twins = {"v": W[::-1].copy(), "w": W}
    # Optax itself makes other updates of them.
    one, other = (each.update(twins, each.init(twins), twins)[0] for each in pair)
    assert any((one[key] != other[key]).any() for key in twins)
    loss = lambda params, x: loss_fn(params, x) + (params["v"] ** 2).mean()
    step_of = lambda inner, **options: make_train_step(loss, inner, **options)
    old, new = (step_of(each, num_shards=2, weight_update="replicated") for each in pair)
    wide = step_of(pair[0], num_shards=4, params="sharded")
    state = saved(tmp_path, old, old.init(twins))

    def what_is_said(step: Any, **how: Any) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found, _ = Checkpoints(tmp_path, step).restore_latest(step.abstract_init(twins), **how)
        for key in twins:
            np.testing.assert_array_equal(step.unshard(found).params[key], state.params[key])
        return [str(each.message) for each in caught if each.category is CheckpointWarning]

    says = "the same ones take other arrays, or other parts of them"
    assert what_is_said(old) == what_is_said(wide) == []
    if is_refused:
        with pytest.raises(CheckpointMismatchError, match=f"operations .*{says}.*strict=False"):
            what_is_said(new)
    assert says in " ".join(what_is_said(new, strict=not is_refused))
    # As 0.3.0 wrote it.
    edit(tmp_path / "00000000" / "manifest" / "manifest.json", as_of_5)
    assert what_is_said(old) == what_is_said(new) == []


def test_what_fits_of_another_optimizer_is_kept(tmp_path: Path):
    constant = step_with("adam")
    schedule = step_with(optax.adam(optax.linear_schedule(0.01, 0, 100)))
    state = saved(tmp_path, constant, trained(constant))
    with pytest.raises(CheckpointMismatchError, match=r"ScaleByScheduleState.*strict=False"):
        restored(tmp_path, schedule)
    says = "ScaleByScheduleState…it has no .opt_state.inner_state[1].count"
    found = restored(tmp_path, schedule, strict=False, says=says)
    was, now = constant.unshard(state), schedule.unshard(found)
    for one, other in (
        (was.params, now.params),
        *zip(was.opt_state.inner_state[0], now.opt_state.inner_state[0], strict=True),
    ):
        check_same_bits(*(list(map(np.asarray, jax.tree.leaves(each))) for each in (one, other)))
    # What does not fit is refused in any case.
    wide = make_train_step(loss_fn, sgd(0.1), num_shards=2)
    like = wide.abstract_init({"w": np.zeros((37, 17), np.float32)})
    with pytest.raises(CheckpointMismatchError, match=r"has the shape .* or choose another folder"):
        Checkpoints(tmp_path, wide).restore_latest(like, strict=False)
    like = wide.abstract_init({"v": W})
    with pytest.raises(CheckpointMismatchError, match=r"it has no \.params\['v'\]"):
        Checkpoints(tmp_path, wide).restore_latest(like, strict=False)


def test_other_dtypes_are_refused_and_converted_if_asked(tmp_path: Path):
    step = step_with()
    state = saved(tmp_path, step)
    says = r"\.params\['w'\] is float32 in it, and bfloat16 here"
    with pytest.raises(CheckpointMismatchError, match=says):
        restored(tmp_path, step, jnp.bfloat16)
    found = restored(tmp_path, step, jnp.bfloat16, strict=False, says="is float32 in it")
    np.testing.assert_array_equal(found.params["w"], state.params["w"].astype(jnp.bfloat16))


@pytest.mark.parametrize("options", [{}, {"weight_update": "sharded"}, {"params": "sharded"}])
def test_new_master_weights_are_the_parameters_before_they_are_rounded(
    options: dict[str, Any], tmp_path: Path
):
    state = saved(tmp_path, step_with())
    step = step_with(master_dtype="float32", **options)
    says = "master_dtype is new"
    found = restored(tmp_path, step, jnp.bfloat16, strict=False, says=says)
    whole = step.unshard(found)
    np.testing.assert_array_equal(whole.params["w"], state.params["w"].astype(jnp.bfloat16))
    np.testing.assert_array_equal(whole.opt_state.inner_state.masters["w"], state.params["w"])
    like = step.abstract_init({"w": jnp.zeros_like(W, jnp.bfloat16)})
    with pytest.raises(
        CheckpointMismatchError, match=r"bfloat16 here\. .*, or restore into a state"
    ):
        Checkpoints(tmp_path, step).restore_params(like)


# Older checkpoints.


def as_of_5(body: Any) -> None:
    """Change a manifest to what 0.3.0 would have written."""
    for update in body["fingerprint"]["updates"].values():
        del update["operands"], update["arrays"]
    body["version"] = 5


def as_before(body: Any) -> None:
    """Change a manifest to what 0.2.0 would have written."""
    as_of_5(body)
    found = body["fingerprint"]
    updates, told = found.pop("updates"), found.pop("options")
    names = "reduction preprocess accumulate_steps weight reduce_dtype nonfinite master_dtype ema"
    words = {name: told[name] for name in names.split()}
    words["weight"] = words["weight"] and "on"
    words["loss_over='batch'"] = "on" if told["loss_over"] == "batch" else None
    words["loss_scale"] = told["loss_scale"] and "DynamicLossScale(initial=65536.0)"
    found |= {
        "update": updates["optimizer"],
        "preprocess": updates.get("preprocess"),
        "options": words,
    }
    body["version"] = 3


def test_a_checkpoint_of_0_2_0_is_restored_and_compared_as_far_as_it_goes(tmp_path: Path):
    options: dict[str, Any] = {"nonfinite": "skip", "loss_scale": "dynamic"}
    step = step_with(preprocess=optax.clip(1.0), **options)
    state = saved(tmp_path, step, trained(step))
    edit(tmp_path / "00000002" / "manifest" / "manifest.json", as_before)
    check_same_bits(arrays(step, restored(tmp_path, step)), arrays(step, state))
    other = step_with(preprocess=optax.clip(2.0), accumulate_steps=2, **options)
    restored(tmp_path, other, says="update of its preprocess…accumulate_steps is 1 in it, and 2")
    rarely = step_with(preprocess=optax.clip(1.0), nonfinite="skip", sync_every=2)
    with pytest.raises(CheckpointMismatchError, match=r"train together in it, and are workers"):
        restored(tmp_path, rarely)


@pytest.mark.parametrize("nonfinite", ["quarantine", "skip"])
def test_what_0_3_0_held_back_of_weighted_sums_is_dropped(tmp_path: Path, nonfinite: str):
    step = step_with(reduce_dtype="int8", nonfinite=nonfinite)
    state = saved(tmp_path, step, trained(step))
    edit(tmp_path / "00000002" / "manifest" / "manifest.json", as_of_5)
    if nonfinite == "skip":
        check_same_bits(arrays(step, restored(tmp_path, step)), arrays(step, state))
        return
    found = restored(tmp_path, step, says="aggregate is new, and its state is made anew")
    was, now = (each.opt_state.aggregate.residual["w"] for each in (state, found))
    assert was.any()
    assert not now.any()
    np.testing.assert_array_equal(found.params["w"], state.params["w"])


def count(batch: Any) -> Any:
    return jnp.float32(len(batch))


@pytest.mark.parametrize(
    ("was", "now", "says"),
    [
        ({"loss_over": "batch"}, {"loss_over": "batch"}, None),
        ({"loss_over": "batch"}, {}, "loss_over is batch in it, and rows here."),
        ({}, {"loss_over": "batch"}, "loss_over is not batch in it, and batch here."),
        ({}, {"loss_over": "shard"}, None),
        ({"weight": count}, {"weight": count}, None),
        ({"weight": count}, {"weight": "mask"}, None),
        ({"weight": count}, {}, "weight is on in it, and off here."),
        ({}, {"weight": count}, "weight is off in it, and a function here."),
        ({"loss_scale": "dynamic"}, {}, "loss_scale is gone, and its state is dropped"),
        ({}, {"loss_scale": "dynamic"}, "loss_scale is new, and its state is made anew"),
    ],
)
def test_what_was_on_in_a_checkpoint_of_0_2_0_is_compared(
    was: dict[str, Any], now: dict[str, Any], says: str | None, tmp_path: Path
):
    step = step_with(**was)
    saved(tmp_path, step)
    edit(next(tmp_path.glob("0*")) / "manifest" / "manifest.json", as_before)
    restored(tmp_path, step_with(**now), says=says)


# A state that is passed on in memory.


def test_a_state_of_other_options_is_refused_by_name(tmp_path: Path):
    plain = step_with()
    state = trained(plain)
    for options, says in (
        ({"nonfinite": "skip"}, "nonfinite"),
        ({"metrics": "grad_norm"}, "metrics"),
        ({"preprocess": optax.trace(0.5)}, "preprocess"),
        ({"ema": 0.5}, "ema or master_dtype"),
    ):
        step = step_with(**options)
        for use in (
            lambda step=step: step(state, XS[0]),
            lambda step=step: Checkpoints(tmp_path, step).save(state),
        ):
            with pytest.raises(ArgumentError, match=rf"{says}.*reshard\(other\.unshard"):
                use()
    one, other = (step_with(preprocess=f(0.5)) for f in (optax.trace, optax.scale_by_rms))
    with pytest.raises(ArgumentError, match="another preprocess"):
        other.reshard(one.unshard(trained(one)))
