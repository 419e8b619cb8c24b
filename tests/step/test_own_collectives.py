"""A loss with collectives of its own is compared, by numbers, with one shard that has all rows."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax

import crossshard
from crossshard.errors import LossError
from tests.quick import deep, deep_but
from tests.step.common import assert_close

SHARDS, WIDTH = 4, 5
draw = np.random.default_rng(0)
W = {name: np.float32(draw.normal(size=(3, WIDTH))) for name in ("image", "text")}
BATCH = {name: np.float32(draw.normal(size=(16, 3))) for name in W}
BATCH["counts"] = np.float32(draw.random((16, WIDTH)) < np.linspace(0.2, 0.9, 16)[:, None])
Loss = Callable[[Any, Any], Any]
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def embedded(w: Any, batch: Any) -> list[Any]:
    return [jnp.tanh(batch[name] @ w[name]) for name in W]


def every(x: Any) -> Any:
    return lax.all_gather(x, "shards", tiled=True)


def contrastive(w: Any, batch: Any, first: Any = None) -> Any:
    images, texts = embedded(w, batch)
    first = lax.axis_index("shards") * len(images) if first is None else first
    labels = first + jnp.arange(len(images))
    one, other = images @ every(texts).T, texts @ every(images).T
    return (cross_entropy(one, labels) + cross_entropy(other, labels)).mean()


def of_one_side(w: Any, batch: Any) -> Any:
    images, texts = embedded(w, batch)
    return cross_entropy(images @ texts.T, jnp.arange(len(images))).mean()


def of_gathered(w: Any, batch: Any) -> Any:
    images, texts = map(every, embedded(w, batch))
    return cross_entropy(images @ texts.T, jnp.arange(len(images))).mean()


def in_a_ring(w: Any, batch: Any, number: int | None = None) -> Any:
    images, texts = embedded(w, batch)
    number = lax.axis_size("shards") if number is None else number
    signs, total = 2 * jnp.eye(len(images)) - 1, 0.0
    for _ in range(number):
        total -= jax.nn.log_sigmoid(signs * (images @ texts.T)).sum()
        texts = lax.ppermute(texts, "shards", [(i, (i + 1) % number) for i in range(number)])
        signs = -jnp.ones_like(signs)
    return total / len(images)


def squares(w: Any, batch: Any) -> Any:
    return (batch["image"] @ w["image"]) ** 2 * batch["counts"]


def of_softmax(w: Any, batch: Any) -> Any:
    """The logarithm of a sum over all rows, without an overflow."""
    scores = squares(w, batch)
    most = lax.pmax(lax.stop_gradient(scores.max()), "shards")
    return jnp.log(lax.psum(jnp.exp(scores - most).sum(), "shards")) + most


def with_groups(reduce: Any) -> Loss:
    groups = [[0, 1], [2, 3]]
    return lambda w, b: reduce(squares(w, b).mean(), "shards", axis_index_groups=groups)


RIGHT: dict[str, Loss] = {
    "gathered": contrastive,
    "of what is gathered": of_gathered,
    "in a ring": in_a_ring,
    "softmax over all rows": of_softmax,
    "gathered losses": lambda w, b: every(squares(w, b)).mean(),
    "gathered counts": lambda w, b: squares(w, b).sum() / every(b["counts"].sum()[None]).mean(),
    "the largest of all": lambda w, b: (squares(w, b) / (1 + every(squares(w, b)).max())).mean(),
}
# What each is wrong by, and which words of the error say so.
WRONG: dict[str, tuple[Loss, str]] = {
    "rows of another shard's number": (lambda w, b: contrastive(w, b, 0), "numbers its rows from"),
    "a part of a ring": (lambda w, b: in_a_ring(w, b) / lax.axis_size("shards"), "not so: "),
    "gathered losses over own rows": (
        lambda w, b: every(squares(w, b)).sum() / len(b["image"]),
        "not so: .* the loss is .*, and the mean of the shards' losses is ",
    ),
    "over gathered counts": (
        lambda w, b: squares(w, b).sum() / every(b["counts"].sum()[None]).sum(),
        "there is all_gather in it",
    ),
    "over the largest count": (
        lambda w, b: squares(w, b).sum() / lax.pmax(b["counts"].sum(), "shards"),
        "there is pmax in it",
    ),
    "a term of the first shard": (
        lambda w, b: (
            squares(w, b).mean()
            + jnp.where(lax.axis_index("shards") == 0, (w["image"] ** 2).sum(), 0)
        ),
        "there is axis_index in it",
    ),
    "sums of groups": (with_groups(lax.psum), "cannot be computed of all rows at once"),
    "the number of shards as a constant": (
        lambda w, b: in_a_ring(w, b, SHARDS),
        r"There are jax.lax.axis_size\(axis\) shards, one in this comparison",
    ),
}


QUICK = [
    "a term of the first shard",
    "sums of groups",
    "over the largest count",
]


def made(loss: Loss, **options: Any) -> Any:
    options = {"num_shards": SHARDS, "optimizer": optax.sgd(0.1)} | options
    return crossshard.make_train_step(loss, **options)


def types_of(*given: Any) -> Any:
    return jax.eval_shape(lambda *given: given, *given)


def stepped(loss: Loss, lowers: bool = False, **options: Any) -> Any:
    """The step and the parameters after one step, which may have been lowered before."""
    step = made(loss, **options)
    state = step.init(W)
    if lowers:
        step.lower(*types_of(state, BATCH))
    state, _ = step(state, BATCH)
    return step, jax.device_get(step.model(state))


def alone(function: Loss) -> Loss:
    """A function of the parameters and a batch, on a single shard."""
    mesh = jax.make_mesh((1,), ("shards",), devices=jax.devices()[:1])
    return jax.shard_map(function, mesh=mesh, in_specs=jax.P(), out_specs=jax.P(), check_vma=False)


def of_one_device(loss: Loss, batch: Any = BATCH) -> Any:
    return jax.tree.map(lambda w, g: w - 0.1 * g, W, alone(jax.grad(loss))(W, batch))


@pytest.mark.parametrize("name", deep_but(["gathered"], RIGHT))
@pytest.mark.parametrize(
    "options",
    deep_but([{}], [{}, {"params": "sharded"}, {"lowers": True}, {"nonfinite": "skip"}]),
    ids=str,
)
def test_what_is_one_shards_of_all_rows_runs(name: str, options: Any):
    step, got = stepped(RIGHT[name], **options)
    assert_close(got, of_one_device(RIGHT[name]), 1e-6)
    assert "by numbers it is a mean over the rows" in str(step.describe())


@pytest.mark.parametrize("name", deep_but(QUICK, WRONG))
def test_what_is_not_is_refused(name: str):
    loss, said = WRONG[name]
    step = made(loss)
    state = step.init(W)
    with pytest.raises(LossError, match=said):
        step(state, BATCH)
    # It may have been lowered before, but not with numbers.
    step.lower(*types_of(state, BATCH))
    with pytest.raises(LossError, match=said):
        step.lower(state, BATCH)
    with pytest.raises(LossError, match=said):
        step(state, BATCH)
    stepped(loss, loss_over="shard")


GROUPS = [[0, 2], [1, 3]]
IN_GROUPS = crossshard.CrossShardOptimizer(optax.sgd(0.1), group_assignment=GROUPS)


def centred(w: Any, batch: Any, groups: Any = None) -> Any:
    images, texts = embedded(w, batch)
    return ((images - lax.pmean(texts.mean(0), "shards", axis_index_groups=groups)) ** 2).mean()


@pytest.mark.parametrize("options", [{"sync_every": 2}, {"optimizer": IN_GROUPS}])
def test_groups_and_workers_send_each_other_nothing(options: Any):
    step = made(centred, **options)
    with pytest.raises(LossError, match=r"in groups, or as workers.*has psum over more than each"):
        step(step.init(W), BATCH)


def test_a_group_may_sum_over_its_own_shards():
    step = made(lambda w, b: centred(w, b, GROUPS), optimizer=IN_GROUPS)
    state, _ = step(step.init(W), BATCH)
    rows = np.concatenate([np.arange(0, 4), np.arange(8, 12)])  # of shards 0 and 2
    whole = lambda w, b: ((b["image"] - b["text"].mean(0)) ** 2).mean()
    of = lambda w, b: whole(w, dict(zip(W, embedded(w, b), strict=True)))
    slopes = jax.grad(of)(W, {name: BATCH[name][rows] for name in W})
    expected = jax.tree.map(lambda w, g: w - 0.1 * g, W, slopes)
    assert_close(jax.device_get(step.model(state, shard=0)), expected, 1e-6)


def test_a_microbatch_has_only_its_own_rows():
    with pytest.raises(LossError, match="sees only its own rows: leave accumulate_steps out"):
        stepped(contrastive, accumulate_steps=2)


@pytest.mark.deep
def test_microbatches_of_gathered_losses_follow_one_device():
    _, got = stepped(RIGHT["gathered losses"], accumulate_steps=2)
    assert_close(got, of_one_device(RIGHT["gathered losses"]), 1e-6)


@pytest.mark.deep
def test_shards_that_add_up_may_each_have_a_part():
    part = lambda w, b: contrastive(w, b) / lax.axis_size("shards")
    optimizer = crossshard.CrossShardOptimizer(optax.sgd(0.1), reduction="sum")
    _, got = stepped(part, optimizer=optimizer)
    assert_close(got, of_one_device(contrastive), 1e-6)
    with pytest.raises(LossError, match="by numbers it is not so"):
        stepped(lambda w, b: contrastive(w, b, 0) / SHARDS, optimizer=optimizer)


def late(w: Any, batch: Any, share: Any) -> Any:
    """As ``contrastive``, and later also with rows of another shard's number."""
    return contrastive(w, batch) + share * contrastive(w, batch, 0)


def test_a_term_that_starts_later_is_compared():
    step = made(lambda w, b: late(w, b, b["share"]), replicated_entries=["share"])
    with pytest.raises(LossError, match=r"other numbers in .*batch\['share'\].* is "):
        step(step.init(W), BATCH | {"share": np.float32(0)})


@pytest.mark.deep
def test_a_term_that_the_number_of_the_step_starts_is_compared():
    counted = lambda w, s, b: (late(w, b, jnp.minimum(s / 1000, 1)), s + 1)
    for kind in ("mean", "per_shard"):
        step = made(counted, model_state=kind)
        with pytest.raises(LossError, match=r"other numbers in .*model_state"):
            step(step.init(W, model_state=jnp.int32(0)), BATCH)
    right = lambda w, s, b: ((1 + s) * contrastive(w, b), s + 1)
    step = made(right, model_state="mean")
    state, _ = step(step.init(W, model_state=jnp.int32(0)), BATCH)
    assert_close(jax.device_get(state.params), of_one_device(contrastive), 1e-6)


@pytest.mark.parametrize(
    "start", [np.int32(1), *map(deep, (np.float32(0.5), np.float32(4), np.bool_(False)))]
)
def test_what_a_count_a_weight_or_a_flag_switches_is_compared(start: Any):
    # Over the threshold, or below it, another term is there.
    term = lambda w, b: jnp.where((b["at"] > 0.1) & (b["at"] < 5), 0.0, contrastive(w, b, 0))
    if start.dtype == bool:
        term = lambda w, b: jnp.where(b["at"], contrastive(w, b, 0), 0.0)
    step = made(lambda w, b: contrastive(w, b) + term(w, b), replicated_entries=["at"])
    with pytest.raises(LossError, match=r"other numbers in .*batch\['at'\].* is "):
        step(step.init(W), BATCH | {"at": start})


def test_a_gate_that_a_parameter_opens_later_is_compared():
    gated = lambda p, b: contrastive(p[0], b) + jax.nn.relu(p[1] - 1) * contrastive(p[0], b, 0)
    step = made(gated)
    with pytest.raises(LossError, match=r"other numbers in .*params"):
        step(step.init((W, jnp.float32(0.5))), BATCH)


@pytest.mark.deep
def test_numbers_of_one_model_say_nothing_of_another():
    class Towers(nnx.Module):
        def __init__(self, first: int | None) -> None:
            self.w, self.first = nnx.Dict({name: nnx.Param(W[name]) for name in W}), first

    def loss(model: Any, batch: Any) -> Any:
        return contrastive({name: model.w[name][...] for name in W}, batch, model.first)

    step = made(loss)
    step(step.init(Towers(None)), BATCH)
    with pytest.raises(LossError, match="by numbers it is not so"):
        step(step.init(Towers(0)), BATCH)


def test_numbers_of_one_table_say_nothing_of_one_of_another_shape():
    of_table = lambda w, b: contrastive(w, b, 0 if len(b["table"]) > 1 else None)
    step = made(of_table, replicated_entries=["table"])
    state, _ = step(step.init(W), BATCH | {"table": np.ones(1)})
    with pytest.raises(LossError, match="by numbers it is not so"):
        step(state, BATCH | {"table": np.ones(2)})


@pytest.mark.deep
def test_numbers_of_one_batch_say_nothing_of_a_step_lowered_for_another():
    of_table = lambda w, b: contrastive(w, b, 0 if len(b["table"]) > 1 else None)
    step = made(of_table, replicated_entries=["table"])
    state = step.init(W)
    step.lower(*types_of(state, BATCH | {"table": np.ones(2)}))
    state, _ = step(state, BATCH | {"table": np.ones(1)})
    for _ in range(2):
        with pytest.raises(LossError, match="by numbers it is not so"):
            step(state, BATCH | {"table": np.ones(2)})


@pytest.mark.deep
def test_a_step_within_another_program_has_been_called_before():
    step = made(contrastive)
    state = step.init(W)
    with pytest.raises(LossError, match="as a part of another program"):
        jax.jit(step)(state, BATCH)
    state, _ = step(state, BATCH)
    jax.jit(step)(state, BATCH)


def normalized(w: Any, batch: Any, mask: Any) -> Any:
    x = squares(w, batch)
    mean = lax.psum((x * mask).sum(0), "shards") / lax.psum(mask.sum(), "shards")
    losses = ((x - mean) ** 2).mean(1)
    return (losses * batch["mask"]).sum() / batch["mask"].sum()


@pytest.mark.parametrize("is_first", [True, False])
def test_rows_of_padding_do_not_count_for_other_shards(is_first: bool):
    whole = BATCH | {"mask": np.ones(16, np.float32)}
    few = {name: x[:14] for name, x in whole.items()}
    of_all = lambda w, b: normalized(w, b, jnp.ones((len(b["mask"]), 1)))
    step = made(of_all, weight="mask")
    state = step.init(W)
    if not is_first:
        state, _ = step(state, whole)
    with pytest.raises(LossError, match=r"padded with rows of zeros.*leave the loss as it is"):
        step(state, few)
    step = made(lambda w, b: normalized(w, b, b["mask"][:, None]), weight="mask")
    state, _ = step(step.init(W), few)
    assert_close(jax.device_get(step.model(state)), of_one_device(of_all, few), 1e-6)


# Model states after one step: those of one device, and others.
STATES = {
    "a queue of all rows": (True, lambda x, s: jnp.concatenate([every(x), s])[: len(s)]),
    "a queue of own rows": (False, lambda x, s: jnp.concatenate([x, s])[: len(s)]),
    "the largest": (True, lambda x, s: jnp.maximum(s, every(x).max(0))),
    "of own rows among all": (False, lambda x, s: s + (x - every(x).mean(0)).var(0)),
    "the smallest of sorted own rows": (False, lambda x, s: s + jnp.sort(x, 0)[0]),
}


@pytest.mark.parametrize("name", deep_but(["a queue of all rows", "a queue of own rows"], STATES))
def test_a_mean_of_model_states_is_that_of_one_device(name: str):
    is_right, change = STATES[name]
    before = np.ones((32, WIDTH), np.float32)
    loss = lambda w, s, b: (squares(w, b).mean(), change(squares(w, b), s))
    step = made(loss, model_state="mean")
    state = step.init(W, model_state=before)
    if not is_right:
        with pytest.raises(LossError, match="Nothing proves that model_state is a mean over rows"):
            step(state, BATCH)
        return
    state, _ = step(state, BATCH)
    want = alone(lambda w, b: loss(w, before, b)[1])(W, BATCH)
    assert_close(jax.device_get(state.model_state), want, 1e-6)


@pytest.mark.deep
def test_noise_of_a_shard_is_none_of_another():
    def loss(w: Any, batch: Any, rng: Any, first: Any = None) -> Any:
        key = jax.random.fold_in(rng, lax.axis_index("shards"))
        keep = jax.random.bernoulli(key, 0.5, batch["image"].shape)
        return contrastive(w, batch | {"image": jnp.where(keep, 2 * batch["image"], 0)}, first)

    step = made(loss)
    step(step.init(W, rng=jax.random.key(0)), BATCH)
    step = made(lambda w, b, rng: loss(w, b, rng, 0))
    with pytest.raises(LossError, match="by numbers it is not so"):
        step(step.init(W, rng=jax.random.key(0)), BATCH)


def over_both(w: Any, batch: Any) -> Any:
    """As ``contrastive``, of one side, over two axes, which ``vmap`` does not gather at once."""
    images, texts = embedded(w, batch)
    labels = lax.axis_index(("data", "shards")) * len(images) + jnp.arange(len(images))
    everyone = lax.all_gather(texts, ("data", "shards"), tiled=True)
    return cross_entropy(images @ everyone.T, labels).mean()


def on_mesh(loss: Loss, axes: tuple[str, str], names: Any) -> Any:
    mesh = jax.make_mesh((2, 2), axes, axis_types=(jax.sharding.AxisType.Auto,) * 2)
    optimizer = crossshard.CrossShardOptimizer(optax.sgd(0.1), axis_name=names)
    step = crossshard.make_train_step(loss, optimizer, mesh=mesh)
    state, _ = step(step.init(W), BATCH)
    return jax.device_get(step.model(state))


@pytest.mark.deep
def test_beside_an_axis_of_the_model():
    got = on_mesh(contrastive, ("shards", "model"), "shards")
    assert_close(got, of_one_device(contrastive), 1e-6)


@pytest.mark.deep
def test_over_both_axes_of_the_shards():
    axes = ("data", "shards")
    assert_close(on_mesh(over_both, axes, axes), of_one_device(of_one_side), 1e-6)
    with pytest.raises(LossError, match="by numbers it is not so"):
        on_mesh(contrastive, axes, axes)  # it has the rows of one of them


@pytest.mark.deep
def test_a_module_with_a_kernel_that_xla_cannot_split():
    class Towers(nnx.Module):
        def __init__(self) -> None:
            for name in W:
                setattr(self, name, nnx.Param(jnp.asarray(W[name])))

    def loss(model: Any, batch: Any) -> Any:
        own = jax.pure_callback(
            np.copy, jax.typeof(batch["image"]), batch["image"], vmap_method="sequential"
        )
        return contrastive({name: getattr(model, name)[...] for name in W}, batch | {"image": own})

    step = made(loss)
    state, _ = step(step.init(Towers()), BATCH)
    got = step.model(state)
    assert_close({name: getattr(got, name)[...] for name in W}, of_one_device(contrastive), 1e-6)
