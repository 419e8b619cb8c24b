"""What losses are in the rows of their batch: means are proven, and all others are told apart."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen
from jax import lax
from jax.experimental import pallas

from crossshard.jaxprs.mean_over_rows import Finding
from crossshard.jaxprs.row_facts import OverRows
from tests.jaxprs.proving import over_rows
from tests.quick import deep_but

ROWS, TIME, WIDTH, CLASSES = 6, 5, 4, 3
W = np.float32(np.random.default_rng(0).normal(size=(WIDTH, WIDTH)))
KEY = jax.random.key(0)
KERNEL = np.ones((3, 3, 2, 4), np.float32)
BATCH = {
    "x": jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32),
    "sequence": jax.ShapeDtypeStruct((ROWS, TIME, WIDTH), jnp.float32),
    "image": jax.ShapeDtypeStruct((ROWS, 8, 8, 2), jnp.float32),
    "mask": jax.ShapeDtypeStruct((ROWS, TIME), jnp.float32),
    "words": jax.ShapeDtypeStruct((ROWS, TIME), jnp.int32),
    "y": jax.ShapeDtypeStruct((ROWS,), jnp.int32),
    "target": jax.ShapeDtypeStruct((ROWS,), jnp.float32),
    "weight": jax.ShapeDtypeStruct((ROWS,), jnp.float32),
}
Loss = Callable[[Any, Any, Any], Any]


def found(loss: Loss, w: Any = W) -> Finding:
    return over_rows(lambda batch, w, key: loss(batch, w, key), BATCH, w, own=KEY)


def attention(x: Any, w: Any, mask: Any = None) -> Any:
    q, k = x @ w, x @ w.T
    scores = jnp.einsum("btd,bsd->bts", q, k) / jnp.sqrt(x.shape[-1])
    scores = jnp.where(jnp.tril(jnp.ones((TIME, TIME), bool)), scores, -1e9)
    if mask is not None:
        scores = jnp.where(mask[:, None, :] > 0, scores, -1e9)
    return jnp.einsum("bts,bsd->btd", jax.nn.softmax(scores), x)


def own(forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., Any]:
    """A function with a gradient of its own."""
    function = jax.custom_vjp(forward)
    function.defvjp(lambda *x: (forward(*x), x), lambda x, g: backward(*x, g))
    return function


def with_gradient(of: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The identity, whose gradient is this function of it."""
    return own(lambda x: x, lambda x, g: (of(g),))


rounded = own(lambda x: jnp.round(x), lambda x, g: (jnp.where(jnp.abs(x) < 1, g, 0.0),))
product = own(jnp.matmul, lambda x, w, g: (g @ w.T, x.T @ g))
half_a_product = own(jnp.matmul, lambda x, w, g: (g @ w.T, x.T @ g / x.shape[0]))  # <-
unit = with_gradient(lambda g: g / jnp.sqrt((g**2).sum()))  # <-
bounded = with_gradient(lambda g: jnp.clip(g, -0.01, 0.01))  # <-
with_centred_tangents = jax.custom_jvp(lambda x: x)
with_centred_tangents.defjvp(lambda x, t: (x[0], t[0] - t[0].mean(0)))  # <-
centred_by_its_gradient = jax.custom_vjp(lambda x: x)
centred_by_its_gradient.defvjp(lambda x: (x - x.mean(0), None), lambda _, g: (g,))  # <-


def attacked(x: Any, w: Any, y: Any) -> Any:
    inner = lambda x: entropy(jax.nn.relu(x @ w), y).mean()
    return ((x + 0.1 * jnp.sign(jax.grad(inner)(x))) @ w).mean()


def halved_while_large(x: Any) -> Any:
    more = lambda s: (s[1] < 5) & (jnp.abs(s[0]).max() > 0.1)
    return lax.while_loop(more, lambda s: (s[0] / 2, s[1] + 1), (x, 0))[0].sum()  # <-


def rotated(x: Any) -> Any:
    angles = jnp.arange(TIME)[:, None] / 10
    x, y = jnp.split(x, 2, -1)
    turned = x * jnp.cos(angles) - y * jnp.sin(angles), x * jnp.sin(angles) + y * jnp.cos(angles)
    return jnp.concatenate(turned, -1)


def layers(b: Any, w: Any) -> Any:
    return lax.scan(lambda x, w: (jnp.tanh(x @ w), (x**2).mean()), b["x"], jnp.stack([w] * 3))


table = jnp.ones((10, WIDTH))
entropy = optax.softmax_cross_entropy_with_integer_labels


def ROWS_OF(b: Any) -> int:
    return b["y"].shape[0]


MEANS: dict[str, Loss] = {
    "arange": lambda b, w, k: (
        -jax.nn.log_softmax(b["x"] @ w)[jnp.arange(ROWS_OF(b)), b["y"]].mean()
    ),
    "regularised": lambda b, w, k: (b["x"] @ w).mean() + 0.1 * (w**2).sum(),
    "attention, masked": lambda b, w, k: attention(b["sequence"], w, b["mask"]).mean(),
    "embedding": lambda b, w, k: (table[b["words"]] @ w).mean(),
    "convolution": lambda b, w, k: lax.conv_general_dilated(
        b["image"], KERNEL, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    ).mean(),
    "pooling": lambda b, w, k: linen.max_pool(b["image"], (2, 2), (2, 2)).mean(),
    "loop over time": lambda b, w, k: lax.fori_loop(
        0, TIME, lambda i, h: jnp.tanh(h @ w + b["sequence"][:, i]), b["x"]
    ).mean(),
    "top k within": lambda b, w, k: lax.top_k(b["x"] @ w, 2)[0].mean(),
    "straight through": lambda b, w, k: (rounded(b["x"] @ w) @ w).mean(),
    "own gradient within rows": lambda b, w, k: jax.vmap(lambda x: product(x, w).sum())(
        b["sequence"]
    ).mean(),
    "own gradient, mapped": lambda b, w, k: lax.map(
        lambda x: product(x, w).sum(), b["sequence"]
    ).mean(),
    "remat": lambda b, w, k: jax.checkpoint(lambda x: jnp.tanh(x @ w))(b["x"]).mean(),
    "dropout": lambda b, w, k: jnp.where(
        jax.random.bernoulli(k, 0.9, b["x"].shape), b["x"] @ w, 0
    ).mean(),
    "keys of rows": lambda b, w, k: jax.vmap(
        lambda x, k: (x * jax.random.normal(k, x.shape)).sum()
    )(b["x"], jax.random.split(k, ROWS_OF(b))).mean(),
    "bfloat16": lambda b, w, k: (b["x"].astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).mean(),
    "written by index": lambda b, w, k: (
        jnp.zeros((ROWS_OF(b), WIDTH)).at[jnp.arange(ROWS_OF(b)), b["y"]].set(b["target"]) @ w
    ).mean(),
    "einsum": lambda b, w, k: jnp.einsum("bi,ij,bj->", b["x"], w, b["x"]) / b["x"].shape[0],
    "noise of a row's number": lambda b, w, k: jax.vmap(
        lambda i, x: (jax.random.normal(jax.random.fold_in(k, i), x.shape) * x @ w).sum()
    )(jnp.arange(ROWS_OF(b)), b["x"]).mean(),
    "attack": lambda b, w, k: attacked(b["x"], w, b["y"]),
    "sum over rows in turn": lambda b, w, k: lax.scan(
        lambda s, x: (s + (x @ w).sum() / ROWS_OF(b), None), 0.0, b["x"]
    )[0],
    "map, divided": lambda b, w, k: lax.map(lambda x: (x @ w).sum() / ROWS_OF(b), b["x"]).sum(),
    "map with a loop": lambda b, w, k: lax.map(
        lambda x: halved_while_large(x) * w.sum(), b["x"]
    ).mean(),
    "a key that is carried": lambda b, w, k: lax.scan(
        lambda k, x: (jax.random.split(k)[0], (x * jax.random.normal(k, (WIDTH,))).sum()), k, b["x"]
    )[1].mean(),
    "two batches behind each other": lambda b, w, k: jnp.multiply(
        *jnp.split(jnp.concatenate([b["x"], 2 * b["x"]]) @ w, 2)
    ).mean(),
    "ctc": lambda b, w, k: optax.ctc_loss(
        b["sequence"] @ w, b["mask"] * 0, b["words"][:, :2] % 3 + 1, jnp.zeros((ROWS_OF(b), 2))
    ).mean(),
    "focal": lambda b, w, k: optax.sigmoid_focal_loss(b["x"] @ w, (b["x"] > 1) * 1.0).mean(),
    "segments within": lambda b, w, k: jax.vmap(
        lambda x, i: (jax.ops.segment_sum(x @ w, i % 3, 3) ** 2).sum()
    )(b["sequence"], b["words"]).mean(),
    "rotary": lambda b, w, k: (rotated(b["sequence"]) @ w).mean(),
    "cache": lambda b, w, k: lax.fori_loop(
        0,
        TIME,
        lambda i, cache: cache.at[:, i].set(b["sequence"][:, i] @ w),
        jnp.zeros((ROWS_OF(b), TIME, WIDTH)),
    ).mean(),
    "last tokens": lambda b, w, k: (
        b["sequence"][jnp.arange(ROWS_OF(b)), (b["mask"] > 0).sum(1) - 1] @ w
    ).mean(),
    "transform within": lambda b, w, k: jnp.abs(jnp.fft.rfft(b["sequence"] @ w, axis=1)).mean(),
    "determinants": lambda b, w, k: jax.vmap(
        lambda x: jnp.linalg.slogdet(x.T @ x + jnp.eye(WIDTH))[1]
    )(b["sequence"]).mean(),
    "terms in a stack": lambda b, w, k: jnp.stack([(b["x"] @ w).mean(), b["target"].mean()]).sum(),
    "terms, written": lambda b, w, k: jnp.zeros(3).at[1].set((b["x"] @ w).mean()).sum(),
    "layers and what they add": lambda b, w, k: layers(b, w)[0].mean() + layers(b, w)[1].sum(),
    "resized": lambda b, w, k: jax.image.resize(
        b["image"], (ROWS_OF(b), 4, 4, 2), "bilinear"
    ).mean(),
    "tiled": lambda b, w, k: (b["x"] * jnp.tile(w[0], (ROWS_OF(b), 1))).mean(),
}


def doubled(w: Any) -> Any:
    def kernel(given: Any, out: Any) -> None:
        out[...] = given[...] * 2

    return pallas.pallas_call(kernel, out_shape=jax.typeof(w), interpret=True)(w)


def composed(w: Any) -> Any:
    return lax.composite(lambda w: jnp.tanh(w) * 2, name="tests.composed")(w)


# Neither has a derivative.
MEANS["kernel of parameters"] = lambda b, w, k: (b["x"] @ doubled(lax.stop_gradient(w))).mean()
MEANS["composite of parameters"] = lambda b, w, k: (b["x"] @ composed(lax.stop_gradient(w))).mean()


def contrastive(b: Any, w: Any, k: Any) -> Any:
    scores = (b["x"] @ w) @ (b["x"] @ w.T).T  # <-
    return entropy(scores, jnp.arange(scores.shape[0])).mean()


def normed(x: Any) -> Any:
    return (x - x.mean(0)) / jnp.sqrt(x.var(0) + 1e-5)  # <-


def balanced(b: Any, w: Any, k: Any) -> Any:
    gates = jax.nn.softmax(b["x"] @ w)
    return (gates.mean(0) * jax.nn.one_hot(gates.argmax(1), WIDTH).mean(0)).sum()  # <-


def time_major(b: Any, w: Any, k: Any) -> Any:
    def step(h: Any, x: Any) -> Any:
        return (jnp.tanh(x @ w + h @ w.T),) * 2  # <-

    return lax.scan(step, jnp.zeros((TIME, WIDTH)), b["sequence"])[1].mean()


def distances(b: Any, w: Any, k: Any) -> Any:
    scores = b["x"] @ w
    return ((scores[:, None] - scores[None]) ** 2).mean()  # <-


def branch_on_the_mean(b: Any, w: Any, k: Any) -> Any:
    one, other = lambda x: (x @ w).mean(), lambda x: (x @ w.T).mean()
    return lax.cond(b["target"].mean() > 0, one, other, b["x"])  # <-


def each_for_each(b: Any, w: Any, k: Any) -> Any:
    scores = (b["x"] @ w).sum(1)[:, None]
    return jnp.broadcast_to(scores, (ROWS_OF(b), ROWS_OF(b))).sum() / ROWS_OF(b)  # <-


def constant_noise(b: Any, w: Any, k: Any) -> Any:
    noise = jax.random.normal(jax.random.key(1), b["x"].shape)  # <-
    return (noise * (b["x"] @ w)).mean()


def token_positions(b: Any, w: Any, k: Any) -> Any:
    words = b["words"].T.reshape(-1)
    scores = jax.nn.log_softmax(b["sequence"] @ w).reshape(-1, WIDTH)
    return jnp.take_along_axis(scores, words[:, None], 1).mean()  # <-


def segments_in_another_order(b: Any, w: Any, k: Any) -> Any:
    words, values = b["words"].reshape(-1), b["mask"].T.reshape(-1)
    sums = jnp.zeros(WIDTH).at[words].add(values)  # <-
    return (sums * w[0]).sum() / ROWS_OF(b)


def patterned(b: Any, w: Any, k: Any) -> Any:
    pattern = jnp.broadcast_to(w[0], (ROWS_OF(b), WIDTH)).reshape(-1)
    return ((b["x"] @ w).T.reshape(-1) * pattern).mean()  # <-


def counted(b: Any, w: Any, k: Any) -> Any:
    step = lambda n, x: (n + 1, (x @ w).sum() * n)  # <-
    return lax.scan(step, 1.0, b["x"])[1].mean()


def growing(b: Any, w: Any, k: Any) -> Any:
    half = jax.jit(lambda x: x / 2)  # <-

    def step(s: Any, x: Any) -> Any:
        s += half((x @ w).sum())
        return s + half(s), None

    return lax.scan(step, 0.0, b["x"])[0] / ROWS_OF(b)


def in_a_window(b: Any, w: Any, k: Any) -> Any:
    scores = (b["x"] @ w).sum(1)
    window = jnp.zeros(100).at[: ROWS_OF(b)].add(scores)  # <-
    return (window * jnp.arange(100.0)).sum() / ROWS_OF(b)


def diagonal(b: Any, w: Any, k: Any) -> Any:
    rows = jnp.arange(ROWS_OF(b))
    return (b["x"] @ w)[rows, rows].mean()  # <-


def written_across(b: Any, w: Any, k: Any) -> Any:
    down = jnp.broadcast_to(b["target"][:, None], (ROWS_OF(b), 40))
    across = jnp.broadcast_to(b["target"], (ROWS, ROWS_OF(b)))
    written = lax.dynamic_update_slice(down, across, (0, 0))  # <-
    return (written * jnp.arange(40.0)).mean() * w.sum()


def branching(condition: Any, of: Any) -> Any:
    return lax.cond(condition, of, lambda: 0.0)  # <-


def any_word(b: Any) -> Any:
    return (b["words"] == 2).any()  # <-


COMPARED: dict[str, Loss] = {
    "microbatches": lambda b, w, k: lax.map(jnp.std, b["x"].reshape(2, -1, WIDTH)).mean(),
    "regulariser of a row": lambda b, w, k: (b["x"] @ w).mean() + (w**2).sum() / ROWS_OF(b),
    "mean beside a ratio": lambda b, w, k: b["y"].mean() + jnp.average(b["y"], weights=b["weight"]),
    "contrastive": contrastive,
    "batch norm": lambda b, w, k: (normed(b["x"] @ w) ** 3).mean(),
    "balance of experts": balanced,
    "time-major": time_major,
    "mixup": lambda b, w, k: ((0.5 * b["x"] + 0.5 * b["x"][::-1]) @ w).mean(),
    "permuted": lambda b, w, k: (jax.random.permutation(k, b["x"]) * b["x"] @ w).mean(),
    "sums so far": lambda b, w, k: (jnp.cumsum(b["x"] @ w, axis=0) ** 2).mean(),
    "distances": distances,
    "position": lambda b, w, k: (jnp.arange(ROWS_OF(b)) * (b["x"] @ w).sum(1)).mean(),
    "a row is written": lambda b, w, k: (b["target"].at[0].set(0.0) * b["x"][:, 0]).mean(),
    "constant noise": constant_noise,
    "clipped by the mean": lambda b, w, k: jnp.minimum((b["x"] @ w).mean(), 1),
    "relu of a mean": lambda b, w, k: jax.nn.relu((b["x"] @ w).mean() - 1),
    "relu of a sum": lambda b, w, k: 0.1 * jax.nn.relu((b["x"] @ w).sum(0) + 1).mean(),
    "a bounded share": lambda b, w, k: jnp.minimum((b["x"] @ w).sum(1) / ROWS_OF(b), 1).sum(),
    "bounded gradient": lambda b, w, k: bounded(b["x"] @ w).mean(),
    "less than one": lambda b, w, k: (b["x"] @ w).sum() / (1 - b["weight"].sum()),
    "maximum of two means": lambda b, w, k: jnp.maximum((b["x"] @ w).mean(), b["target"].mean()),
    "convolution over rows": lambda b, w, k: jnp.convolve(b["target"], w[0], "same").mean(),
    "a branch on the mean": branch_on_the_mean,
    "tokens in another order": token_positions,
    "segments in another order": segments_in_another_order,
    "a pattern in another order": patterned,
    "counted in a scan": counted,
    "growing in a scan": growing,
    "in a window": in_a_window,
    "written across": written_across,
    "moved far": lambda b, w, k: (b["x"] @ w).sum() / (b["weight"].sum() + 100),
    "integer mean": lambda b, w, k: lax.div(b["words"].sum(), ROWS_OF(b)) * w.sum(),
    "mean as an integer": lambda b, w, k: (9 * b["x"].mean()).astype(int) * w.sum(),
    "gradient of unit length": lambda b, w, k: unit(b["x"] @ w).mean(),
    "centred tangents": lambda b, w, k: (with_centred_tangents(b["x"] @ w) ** 2).mean(),
    "another value": lambda b, w, k: (centred_by_its_gradient(b["x"] @ w) ** 2).mean(),
    "largest k rows": lambda b, w, k: lax.top_k((b["x"] @ w).T, 2)[0].mean(),
    "median": lambda b, w, k: jnp.median(b["x"] @ w, axis=0).sum(),
    "any row chooses": lambda b, w, k: (jnp.where(any_word(b), 2 * b["x"], b["x"]) @ w).mean(),
    "any row, as it is": lambda b, w, k: jnp.where(any_word(b)[None], b["x"][:, 0], 0).mean(),
    "any row branches": lambda b, w, k: branching(any_word(b), lambda: (b["x"] @ w).mean()),
    "a step without NaN": lambda b, w, k: branching(
        ~jnp.isnan(b["x"]).any(), lambda: (b["x"] @ w).mean()
    ),
    "whether any row": lambda b, w, k: (b["x"] @ w).mean() + any_word(b).astype(np.float32),
}


def noted(b: Any, w: Any, k: Any) -> Any:
    note = jax.new_ref(jnp.zeros(()))
    note[...] = (b["x"] @ w).mean() ** 2
    return note[...]  # <-


def unsorted(b: Any, w: Any, k: Any) -> Any:
    order = jnp.argsort(b["y"] % 3)  # <-
    return (b["x"][order] @ w)[jnp.argsort(order)].mean()


def grouped(b: Any, w: Any, k: Any) -> Any:
    sizes = jnp.bincount(b["y"] % 3, length=3)
    return lax.ragged_dot(b["x"], jnp.stack([w] * 3), sizes).mean()  # <-


def asked_again(b: Any, w: Any, k: Any) -> Any:
    count = lambda: (b["mask"] * (b["words"] > 0)).sum()
    return (b["x"] @ w).sum() / jnp.where(count() == 0, 1, count())  # <-


# Nothing proves them, and numbers tell that some are means all the same.
UNDECIDED: dict[str, Loss] = {
    # A loop over chunks takes slices too, and all of them.
    "roll": lambda b, w, k: ((b["x"] - jnp.roll(b["x"], 1, 0)) @ w).mean(),
    "sorted and unsorted": unsorted,
    "grouped product": grouped,
    "guard of the same sum, computed again": asked_again,
    "guard of any row": lambda b, w, k: jnp.where(
        any_word(b),  # <-
        (b["mask"] * w[0, 0]).sum() / jnp.maximum(1, b["mask"].sum()),
        0,
    ),
    "branch of any row": lambda b, w, k: branching(
        any_word(b), lambda: (b["x"] @ w).sum() / b["mask"].sum()
    ),
    "read from outside": lambda b, w, k: jax.experimental.io_callback(np.abs, b["y"][0], w[0, 0]),
    "position, twice": diagonal,
    "each row for each row": each_for_each,
    "sorted rows": lambda b, w, k: jnp.sort(b["x"] @ w, axis=0)[0].mean(),
    "queue": lambda b, w, k: ((b["x"] @ w) @ jnp.concatenate([b["x"], W]).T).mean(),
    "half a gradient": lambda b, w, k: half_a_product(b["x"], w).mean(),
    "ratios of classes": lambda b, w, k: ((b["x"] @ w).sum(0) / b["x"].sum(0)).sum(),
    "padded sum": lambda b, w, k: jnp.pad(b["x"].sum(0), 1, constant_values=5.0).sum() / ROWS_OF(b),
    "noted": noted,
    "called back": lambda b, w, k: jax.pure_callback(np.std, b["target"][0], b["target"]),
    "loop of each row": lambda b, w, k: jax.vmap(halved_while_large)(b["x"]).mean(),
}


RATIOS: dict[str, tuple[Loss, str | None]] = {
    "token mean": (
        lambda b, w, k: ((b["sequence"] @ w).sum(-1) * b["mask"]).sum() / b["mask"].sum(),
        "mask",
    ),
    "token mean, if there is any": (
        lambda b, w, k: jnp.where(
            b["mask"].sum() > 0,
            ((b["sequence"] @ w).sum(-1) * b["mask"]).sum() / b["mask"].sum(),
            0.0,
        ),
        "mask",
    ),
    "token mean in a branch": (
        lambda b, w, k: lax.cond(
            b["mask"].sum() > 0,
            lambda: ((b["sequence"] @ w).sum(-1) * b["mask"]).sum() / b["mask"].sum(),
            lambda: 0.0,
        ),
        "mask",
    ),
    "mean where": (
        lambda b, w, k: jnp.mean((b["sequence"] @ w).sum(-1), where=b["mask"] > 0),
        None,
    ),
    "as gemma has it": (
        lambda b, w, k: (
            ((b["sequence"] @ w).sum(-1) * b["mask"]).sum(1) * ROWS_OF(b) / b["mask"].sum()
        ).mean(),
        "mask",
    ),
    "multiplied by one by the sum": (
        lambda b, w, k: ((b["x"] @ w).sum(1) * b["weight"] * (1 / b["weight"].sum())).sum(),
        "weight",
    ),
    "contracted": (
        lambda b, w, k: (b["x"] @ w).sum(1) @ (b["weight"] / b["weight"].sum()),
        "weight",
    ),
    "two ratios of one sum": (
        lambda b, w, k: sum(
            x.sum() / b["mask"].sum() for x in ((b["x"] @ w).sum(1), 0.1 * jnp.abs(b["x"] @ w))
        ),
        "mask",
    ),
    "words that count": (
        lambda b, w, k: (
            ((table[b["words"]] @ w).sum(-1) * (b["words"] > 0)).sum() / (b["words"] > 0).sum()
        ),
        None,
    ),
}


@pytest.mark.parametrize("name", MEANS)
def test_a_mean_over_rows_is_proven(name: str):
    assert found(MEANS[name]) == Finding(OverRows.MEAN)


LINES = Path(__file__).read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("name", [*COMPARED, *UNDECIDED])
def test_what_is_no_mean_is_refused_with_its_line(name: str):
    finding = found(COMPARED.get(name) or UNDECIDED[name])
    assert finding.kind is (OverRows.COMPARED if name in COMPARED else OverRows.UNDECIDED), finding
    assert finding.reason
    file, line = finding.source.rsplit(":", 1)
    assert file.endswith("test_mean_over_rows.py")
    # That of the row, or one that is marked in what it calls.
    text = LINES[int(line) - 1]
    assert text.lstrip().startswith(f'"{name}"') or text.endswith("# <-"), finding


@pytest.mark.parametrize("name", RATIOS)
def test_a_ratio_of_sums_is_told_with_its_weight(name: str):
    loss, weight = RATIOS[name]
    finding = found(loss)
    assert finding.kind is OverRows.RATIO, finding
    assert "test_mean_over_rows.py" in finding.source
    entry = None if weight is None else sorted(BATCH).index(weight)
    assert finding.entry == entry


def over(divisor: Callable[[Any], Any]) -> Loss:
    return lambda b, w, k: ((b["x"] @ w).sum(1) * b["weight"]).sum() / divisor(b)


def guarded(count: Any, otherwise: Any) -> Any:
    return jnp.where(count == 0, otherwise, count)


# What is done to the sum that divides, the bound, and whether it is one of integers.
DIVISORS: dict[str, tuple[Callable[[Any], Any], str, float, bool]] = {
    "weights": (lambda b: b["weight"].sum(), "", 0, False),
    "weights, a small bound": (lambda b: jnp.clip(b["weight"].sum(), 1e-8), "max", 1e-8, False),
    "weights and a bit": (lambda b: b["weight"].sum() + 1e-6, "plus", 1e-6, False),
    "weights less a bit": (lambda b: b["weight"].sum() - 1e-6, "plus", -1e-6, False),
    "words, at least 1": (lambda b: jnp.maximum((b["words"] > 0).sum(), 1), "max", 1, True),
    "words, guarded": (lambda b: guarded((b["words"] > 0).sum(), 1), "guard", 1, True),
    "chosen ones and zeros": (
        lambda b: jnp.maximum(jnp.where(b["words"] > 0, 1.0, 0.0).sum(), 1),
        "max",
        1,
        True,
    ),
    "scaled words": (lambda b: 0.01 * (b["words"] > 0).sum(), "", 0, False),
    "some classes": (lambda b: ((b["words"] > 0) * b["mask"]).sum(), "", 0, False),
}


@pytest.mark.parametrize("name", DIVISORS)
def test_what_is_done_to_the_sum_that_divides_is_told(name: str):
    divisor, *want = DIVISORS[name]
    finding = found(over(divisor))
    assert finding.kind is OverRows.RATIO, finding
    assert finding.by is not None
    assert [finding.moved, pytest.approx(finding.bound), finding.counts] == want
    assert finding.entry == (sorted(BATCH).index("weight") if name.startswith("weights") else None)


def test_a_small_term_of_a_mean_that_divides_is_told():
    of_means = lambda term: (
        lambda b, w, k: ((b["x"] @ w).sum(1) * b["weight"]).mean() / (b["weight"].mean() + term)
    )
    # Each row then has so much more, and a sum is one of all rows.
    finding = found(of_means(5e-4))
    assert (finding.power, finding.moved, finding.bound) == (0, "", pytest.approx(5e-4))
    assert found(of_means(0.0)).bound == 0
    finding = found(over(lambda b: 2 * (b["weight"].mean() + 5e-4) * ROWS_OF(b)))
    assert (finding.power, finding.moved, finding.bound) == (1, "", np.inf)


def test_sums_of_two_calls_are_not_one():
    count = jax.jit(lambda x: (x * x).sum())

    def loss(b: Any, w: Any, k: Any) -> Any:
        one, other = count(b["weight"]), count(b["weight"] + 1)
        total = ((b["x"] @ w).sum(1) * b["weight"]).sum()
        return total / one + total / other

    assert found(loss).kind is OverRows.UNDECIDED


def test_a_guard_of_a_sum_that_is_not_known_is_of_no_other():
    def chosen(b: Any, w: Any) -> Any:
        return lax.cond(w[0, 0] > 0, lambda: (b["mask"] ** 2).sum(), lambda: b["weight"].sum())

    def loss(b: Any, w: Any, k: Any) -> Any:
        total = (b["x"] @ w).sum()
        return total / jnp.where(chosen(b, w) == 0, 1.0, chosen(b, w.T))

    assert found(loss).kind in (OverRows.COMPARED, OverRows.UNDECIDED)


def test_sums_of_two_turns_are_not_one():
    def loss(b: Any, w: Any, k: Any) -> Any:
        total = (b["x"] @ w).sum()
        turn = lambda so_far, mask: (so_far + total / (mask * mask).sum(), None)
        return lax.scan(turn, 0.0, b["mask"].T)[0]

    assert found(loss).kind is OverRows.UNDECIDED


# Their noise is another on halves of the rows.
NOISY = {"dropout", "keys of rows", "noise of a row's number", "a key that is carried"}
QUICK = {"attention, masked", "arange", "rotary", "map, divided", "straight through", "cache"}


@pytest.mark.parametrize("name", deep_but(QUICK, sorted({*MEANS} - NOISY)))
def test_what_is_proven_is_the_mean_of_halves(name: str):
    rng = np.random.default_rng(7)

    def of(x: Any) -> Any:
        if x.dtype == jnp.int32:
            return rng.integers(0, 3, x.shape, np.int32)
        return np.float32(rng.uniform(0.1, 2, x.shape))

    batch = jax.tree.map(lambda x: jnp.asarray(of(x)), BATCH)
    halves = [jax.tree.map(lambda x, at=at: x[at], batch) for at in (slice(3), slice(3, None))]
    of_rows = jax.jit(jax.value_and_grad(lambda w, batch: MEANS[name](batch, w, KEY)))
    whole = of_rows(W, batch)
    parts = jax.tree.map(lambda one, other: (one + other) / 2, *[of_rows(W, x) for x in halves])
    tolerance = 2e-2 if name == "bfloat16" else 1e-5
    for one, other in zip(whole, parts, strict=True):
        scale = max(1, np.abs(other).max())
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance * scale)


def test_a_sum_is_no_mean():
    assert found(lambda b, w, k: ((b["x"] @ w) ** 2).sum()).kind is OverRows.SUM
    assert found(lambda b, w, k: ((b["x"] @ w) ** 2).sum() / ROWS).kind is OverRows.SUM
    assert found(lambda b, w, k: ((b["x"] @ w) ** 2).sum() / ROWS / 2).kind is OverRows.SUM


def test_a_mean_that_is_divided_again_is_none():
    mapped = lambda b, w, k: lax.map(lambda x: (x @ w).sum() / ROWS_OF(b), b["x"]).mean()
    of_rows = lambda b, w, k: lax.map(lambda x: (x @ w).sum(), b["x"] / ROWS_OF(b)).mean()
    plain = lambda b, w, k: (b["x"] @ w).mean() / ROWS_OF(b)
    ratio = lambda b, w, k: (b["x"] @ w).sum() / b["weight"].sum() / ROWS_OF(b)
    decay = lambda b, w, k: (w**2).sum() / ROWS_OF(b)
    # A factor of 1 is no number of shards.
    for loss in (mapped, of_rows, plain, ratio, decay, lambda *of: decay(*of) / 1.0):
        assert found(loss) == Finding(OverRows.UNDECIDED, "it falls with the number of rows")


def test_what_is_written_in_place_says_so():
    assert found(noted).reason == "a value that is written in place"


def test_what_has_other_equations_is_not_decided():
    def loss(b: Any, w: Any, k: Any) -> Any:
        return (b["x"] @ w if ROWS_OF(b) <= ROWS else b["x"] @ w.T).mean()

    assert found(loss).kind is OverRows.UNDECIDED


@pytest.mark.parametrize(
    "loss",
    [
        lambda b, w, k: jnp.where(b["weight"].sum() > 0, RATIOS["token mean"][0](b, w, k), 0.0),
        lambda b, w, k: jnp.where(b["mask"].sum() > 0, (b["x"] @ w).mean(), 0.0),
        lambda b, w, k: lax.cond(b["mask"].sum() > 0, lambda: (b["x"] @ w).mean(), lambda: 0.0),
        lambda b, w, k: (b["mask"].sum() > 0) * (w**2).sum(),
        lambda b, w, k: jnp.where(b["mask"].sum() > 3, RATIOS["token mean"][0](b, w, k), 0.0),
        lambda b, w, k: jnp.where(b["mask"].sum() > 0, 0.0, RATIOS["token mean"][0](b, w, k)),
    ],
)
def test_a_sum_that_guards_something_else_decides(loss: Loss):
    assert found(loss).kind in (OverRows.COMPARED, OverRows.UNDECIDED)


# Losses that work on a fixed number of chunks of the rows, as chunked cross entropy does.


def cut(x: Any, chunks: int = 2) -> Any:
    return x.reshape(chunks, -1, *x.shape[1:])


def in_chunks(b: Any, w: Any) -> tuple[Any, Any]:
    """The sum of the losses of what counts, and how many count."""

    @jax.checkpoint
    def turn(so_far: Any, chunk: Any) -> Any:
        x, y = chunk
        losses, counts = entropy(x @ w, y), y > 0
        return (so_far[0] + (losses * counts).sum(), so_far[1] + counts.sum()), None

    return lax.scan(turn, (0.0, 0), (cut(b["x"]), cut(b["y"])))[0]


def scanned(turn: Callable[..., Any], start: Any, b: Any) -> Any:
    return lax.scan(turn, start, cut(b["x"]))


SUMS = lambda b, w: lax.map(lambda x: jnp.tanh(x @ w).sum(), cut(b["x"]))
# What treats chunks unlike, whose rows are others in the whole batch.
UNLIKE: dict[str, Loss] = {
    "counted": lambda b, w, k: (
        scanned(lambda at, x: (at + 1, at * (x @ w).sum()), 1.0, b)[1].sum() / ROWS_OF(b)
    ),
    "one after the other": lambda b, w, k: scanned(
        lambda h, x: (jnp.tanh(h + x @ w), None), jnp.zeros((ROWS_OF(b) // 2, WIDTH)), b
    )[0].mean(),
    "weighted": lambda b, w, k: (SUMS(b, w) * jnp.arange(2)).sum() / ROWS_OF(b),
    "weighted in turn": lambda b, w, k: (
        lax.map(lambda xs: xs[0].sum() * xs[1], (cut(b["x"]), jnp.arange(2))).sum() / ROWS_OF(b)
    ),
    "centred": lambda b, w, k: lax.map(lambda x: ((x - x.mean(0)) ** 2).sum(), cut(b["x"])).mean(),
    "ratios": lambda b, w, k: lax.map(
        lambda xs: (xs[0].sum(1) * xs[1]).sum() / xs[1].sum(), (cut(b["x"]), cut(b["weight"]))
    ).mean(),
    "in another order": lambda b, w, k: (cut(b["weight"]).T.reshape(-1) * b["x"][:, 0]).mean(),
    "across": lambda b, w, k: (cut(b["x"]).sum(0) ** 2).mean(),
    "read in turn": lambda b, w, k: (
        lax.map(lambda at: cut(b["x"])[at].sum() * at, jnp.arange(2)).sum() / ROWS_OF(b)
    ),
}


def test_sums_in_chunks_are_proven():
    assert found(lambda b, w, k: in_chunks(b, w)[0] / ROWS_OF(b)).kind is OverRows.MEAN
    finding = found(lambda b, w, k: in_chunks(b, w)[0] / jnp.maximum(in_chunks(b, w)[1], 1))
    assert (finding.kind, finding.moved, finding.bound) == (OverRows.RATIO, "max", 1)
    assert finding.counts
    floats = lambda b: lax.scan(lambda s, m: (s + m.sum(), None), 0.0, cut(b["weight"]))[0]
    finding = found(lambda b, w, k: (b["x"] @ w).sum() / floats(b))
    assert (finding.kind, finding.counts) == (OverRows.RATIO, False)


@pytest.mark.parametrize("name", UNLIKE)
def test_what_treats_chunks_unlike_is_not_proven(name: str):
    assert found(UNLIKE[name]).kind in (OverRows.UNDECIDED, OverRows.COMPARED)


def test_what_is_assumed_of_an_operation_in_a_chunk_is_told():
    """The callback may let rows meet, which no trace shows."""

    def turn(so_far: Any, x: Any) -> Any:
        own = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return so_far + jax.pure_callback(lambda x: x, own, x).sum(), None

    finding = found(lambda b, w, k: scanned(turn, 0.0, b)[0] / ROWS_OF(b))
    assert "pure_callback" in str(finding.assumes)
