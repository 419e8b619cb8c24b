"""Right steps of the training programs that people have: GAN, PPO, DQN, MAML, DP-SGD and others."""

from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.tools.steps import SPLIT, WHOLE, first_params, mean, mesh_of, over, updated
from tests.tools.verification.right import (
    BATCH,
    X,
    Y,
    in_shard_map,
    mse,
    of_step,
    on_global_arrays,
    right,
    step_factory,
)

RNG = np.random.default_rng(1)


def dense(*shape: int) -> jax.Array:
    scale = 1 / np.sqrt(shape[0])
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape) * scale, jnp.float32)


def net(params: Any, x: Any) -> Any:
    return jnp.tanh(x @ params["a"]) @ params["b"]


# The three ways of several devices, plainly.


@step_factory()
def plain_pmap(optimizer, n):
    def one(params: Any, state: Any, x: Any, y: Any) -> Any:
        value, gradients = jax.value_and_grad(mse)(params, x, y)
        return *updated(optimizer, params, state, mean(gradients)), mean(value)

    run = jax.pmap(one, "s", in_axes=(None, None, 0, 0), out_axes=None, devices=jax.devices()[:n])
    step = lambda params, state, x, y: run(params, state, x.reshape(n, -1, 4), y.reshape(n, -1))
    params = first_params()
    return step, params, optimizer.init(params)


@step_factory()
def vmap_over_an_axis_in_jit(optimizer, n):
    rows = NamedSharding(mesh_of(s=n), SPLIT)

    @jax.jit
    def run(params: Any, state: Any, x: Any, y: Any) -> Any:
        x, y = lax.with_sharding_constraint((x.reshape(n, -1, 4), y.reshape(n, -1)), rows)

        def one(x: Any, y: Any) -> Any:
            return mean(jax.grad(mse)(params, x, y))

        gradients = jax.vmap(one, out_axes=None, axis_name="s")(x, y)
        return updated(optimizer, params, state, gradients)

    params = first_params()
    return run, params, optimizer.init(params)


right("jit with the batch split by NamedSharding", on_global_arrays(mse, first_params()))


@in_shard_map()
def gradients_accumulated_by_hand(optimizer, n, params, state, x, y):
    def add(total: Any, rows: Any) -> Any:
        return jax.tree.map(jnp.add, total, jax.grad(mse)(params, *rows)), None

    parts = x.reshape(4, -1, 4), y.reshape(4, -1)
    total, _ = lax.scan(add, jax.tree.map(jnp.zeros_like, params), parts)
    gradients = mean(jax.tree.map(lambda g: g / 4, total))
    return updated(optimizer, params, state, gradients)


def plain(optimizer: Any, n: int, params: Any, state: Any, x: Any, y: Any) -> Any:
    return updated(optimizer, params, state, mean(jax.grad(mse)(params, x, y)))


@in_shard_map(chain=lambda sgd: optax.MultiSteps(sgd, every_k_schedule=3))
def gradients_accumulated_by_optax(*args):
    return plain(*args)


@in_shard_map(chain=lambda sgd: optax.chain(optax.scale_by_schedule(lambda count: 0.5**count), sgd))
def a_schedule_of_optax(*args):
    return plain(*args)


@in_shard_map()
def two_gradients_by_sharpness_aware_minimization(optimizer, n, params, state, x, y):
    first = mean(jax.grad(mse)(params, x, y))
    there = jax.tree.map(lambda p, g: p + 0.05 * g / optax.tree.norm(first), params, first)
    return updated(optimizer, params, state, mean(jax.grad(mse)(there, x, y)))


@step_factory()
def stochastic_weight_averaging(optimizer, n):
    def step(params: Any, rest: Any, x: Any, y: Any) -> Any:
        state, average, count = rest
        params, state = updated(optimizer, params, state, mean(jax.grad(mse)(params, x, y)))
        average = jax.tree.map(lambda a, p: a + (p - a) / (count + 1), average, params)
        return params, (state, average, count + 1)

    params = first_params()
    run = over(step, (WHOLE, WHOLE, SPLIT, SPLIT), WHOLE, mesh_of(s=n))
    return run, params, (optimizer.init(params), params, jnp.int32(1))


# Losses over the whole batch.


def clip_loss(params: Any, x: Any, y: Any) -> Any:
    """Images and texts, each by its own tower; the temperature is learned."""
    unit = lambda z: z / jnp.linalg.norm(z, axis=-1, keepdims=True)
    image = unit(x @ params["image"])
    text = unit(jnp.stack([y, y**2, jnp.sin(y)], 1) @ params["text"])
    scores = jnp.exp(params["scale"]) * image @ text.T
    labels = jnp.arange(len(x))
    of = optax.softmax_cross_entropy_with_integer_labels
    return (of(scores, labels).mean() + of(scores.T, labels).mean()) / 2


CLIP = {"image": dense(4, 8), "text": dense(3, 8), "scale": jnp.float32(1.0)}
right("clip over the whole batch in jit", on_global_arrays(clip_loss, CLIP))


@step_factory()
def clip_with_all_gather(optimizer, n):
    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        unit = lambda z: z / jnp.linalg.norm(z, axis=-1, keepdims=True)

        def loss(params: Any) -> Any:
            image = unit(x @ params["image"])
            text = unit(jnp.stack([y, y**2, jnp.sin(y)], 1) @ params["text"])
            images, texts = (lax.all_gather(z, "s", tiled=True) for z in (image, text))
            labels = lax.axis_index("s") * len(x) + jnp.arange(len(x))
            of = optax.softmax_cross_entropy_with_integer_labels
            scale = jnp.exp(params["scale"])
            both = of(scale * image @ texts.T, labels), of(scale * text @ images.T, labels)
            return (both[0].mean() + both[1].mean()) / 2

        value, gradients = jax.value_and_grad(loss)(params)
        return *updated(optimizer, params, state, mean(gradients)), mean(value)

    run = over(step, (WHOLE, WHOLE, SPLIT, SPLIT), WHOLE, mesh_of(s=n))
    return run, CLIP, optimizer.init(CLIP)


def balance(params: Any, x: Any, y: Any) -> Any:
    """Experts by a soft gate, and a penalty for their uneven load over all rows."""
    gate = jax.nn.softmax(x @ params["gate"])
    out = jnp.einsum("re,ref->r", gate, jnp.tanh(jnp.einsum("ri,eif->ref", x, params["experts"])))
    return jnp.mean((out - y) ** 2) + jnp.sum(gate.mean(0) ** 2)


EXPERTS = {"gate": dense(4, 4), "experts": dense(4, 4, 3)}
right("load balance of experts in jit", on_global_arrays(balance, EXPERTS))


@step_factory(num_shards=4)
def experts_on_a_model_axis(optimizer, n):
    """Each pair of devices has the experts in halves."""
    mesh = mesh_of(s=n, model=2)
    lie = {"gate": P(), "experts": P("model")}
    rows = NamedSharding(mesh, SPLIT)

    @jax.jit
    def run(params: Any, state: Any, x: Any, y: Any) -> Any:
        gradients = jax.grad(balance)(params, x, y)
        return updated(optimizer, params, state, gradients)

    params = {k: jax.device_put(p, NamedSharding(mesh, lie[k])) for k, p in EXPERTS.items()}
    step = lambda params, state, x, y: run(params, state, *jax.device_put((x, y), rows))
    return step, params, optimizer.init(params)


# Language models, sequences, graphs.

TOKENS = RNG.integers(0, 16, (32, 6)).astype(np.int32)
LENGTHS = (1 + np.arange(32) % 6).astype(np.int32)


@step_factory(TOKENS, LENGTHS)
def a_language_model_with_a_mean_over_tokens(optimizer, n):
    params = {"embed": dense(16, 8), "mix": dense(8, 8), "out": dense(8, 16)}

    def step(params: Any, state: Any, tokens: Any, lengths: Any) -> Any:
        def loss(params: Any) -> Any:
            h = params["embed"][tokens[:, :-1]]
            mask = jnp.tril(jnp.ones((5, 5)))
            scores = jnp.where(mask, jnp.einsum("rsi,ij,rtj->rst", h, params["mix"], h), -1e9)
            h = h + jax.nn.softmax(scores) @ h
            each = optax.softmax_cross_entropy_with_integer_labels(h @ params["out"], tokens[:, 1:])
            weight = jnp.arange(5) < lengths[:, None]
            return (each * weight).sum() / lax.psum(weight.sum(), "s")

        value, gradients = jax.value_and_grad(loss)(params)
        return *updated(optimizer, params, state, lax.psum(gradients, "s")), lax.psum(value, "s")

    run = over(step, (WHOLE, WHOLE, SPLIT, SPLIT), WHOLE, mesh_of(s=n))
    return run, params, optimizer.init(params)


@step_factory(RNG.normal(size=(32, 5, 4)).astype(np.float32), Y)
def recurrent_with_a_carried_state(optimizer, n):
    """Each row's state goes on to the next batch, as in truncated backpropagation."""
    params = {"in": dense(4, 6), "again": dense(6, 6), "out": dense(6)}

    def step(params: Any, state: Any, carry: Any, x: Any, y: Any) -> Any:
        def loss(params: Any) -> Any:
            cell = lambda h, x: (jnp.tanh(x @ params["in"] + h @ params["again"]), None)
            last, _ = lax.scan(cell, carry, x.swapaxes(0, 1))
            return jnp.mean((last @ params["out"] - y) ** 2), last

        (value, last), gradients = jax.value_and_grad(loss, has_aux=True)(params)
        params, state = updated(optimizer, params, state, mean(gradients))
        return params, state, lax.stop_gradient(last), mean(value)

    specs = (WHOLE, WHOLE, SPLIT, SPLIT, SPLIT)
    run = over(step, specs, (WHOLE, WHOLE, SPLIT, WHOLE), mesh_of(s=n))
    return run, params, optimizer.init(params), jnp.zeros((32, 6))


EDGES = RNG.integers(0, 5, (32, 8, 2)).astype(np.int32)


@step_factory(RNG.normal(size=(32, 5, 4)).astype(np.float32), EDGES, Y)
def batches_of_graphs(optimizer, n):
    params = {"own": dense(4, 6), "from": dense(4, 6), "out": dense(6)}

    def one(params: Any, nodes: Any, edges: Any) -> Any:
        heard = jax.ops.segment_sum(nodes[edges[:, 0]], edges[:, 1], 5)
        h = jnp.tanh(nodes @ params["own"] + heard @ params["from"])
        return h.max(0) @ params["out"]

    def step(params: Any, state: Any, nodes: Any, edges: Any, y: Any) -> Any:
        def loss(params: Any) -> Any:
            out = jax.vmap(one, (None, 0, 0))(params, nodes, edges)
            return jnp.mean(jnp.abs(out - y))

        return updated(optimizer, params, state, mean(jax.grad(loss)(params)))

    run = over(step, (WHOLE, WHOLE, SPLIT, SPLIT, SPLIT), WHOLE, mesh_of(s=n))
    return run, params, optimizer.init(params)


# Games against oneself or a world.


@step_factory()
def a_gan_with_two_optimizers(optimizer, n):
    def step(state: Any, x: Any, y: Any) -> Any:
        gen, critic, gen_opt, critic_opt, key = state
        key, now = jax.random.split(key)
        now = jax.random.fold_in(now, lax.axis_index("s"))
        z = jax.random.normal(now, x.shape)
        made = lambda gen: jnp.tanh(z @ gen["a"]) @ gen["b"]

        def of_critic(critic: Any) -> Any:
            real, fake = net(critic, x), net(critic, made(gen))
            return jnp.mean(jax.nn.softplus(-real)) + jnp.mean(jax.nn.softplus(fake))

        critic_loss, gradients = jax.value_and_grad(of_critic)(critic)
        critic, critic_opt = updated(optimizer, critic, critic_opt, mean(gradients))
        of_gen = lambda gen: jnp.mean(jax.nn.softplus(-net(critic, made(gen))))
        gen_loss, gradients = jax.value_and_grad(of_gen)(gen)
        gen, gen_opt = updated(optimizer, gen, gen_opt, mean(gradients))
        return (gen, critic, gen_opt, critic_opt, key), mean((gen_loss, critic_loss))

    gen, critic = {"a": dense(4, 6), "b": dense(6, 4)}, first_params()
    run = over(step, (WHOLE, SPLIT, SPLIT), WHOLE, mesh_of(s=n))
    state = gen, critic, optimizer.init(gen), optimizer.init(critic), jax.random.PRNGKey(0)
    return run, state


ACTIONS = RNG.integers(0, 3, 32).astype(np.int32)


@step_factory(X, ACTIONS, Y)
def ppo_with_normalised_advantages_in_epochs(optimizer, n):
    """Two updates in a step."""
    params = {"a": dense(4, 6), "policy": dense(6, 3), "value": dense(6)}

    def step(params: Any, state: Any, x: Any, action: Any, reward: Any) -> Any:
        def heads(params: Any) -> Any:
            h = jnp.tanh(x @ params["a"])
            logits = jax.nn.log_softmax(h @ params["policy"])
            return logits[jnp.arange(len(x)), action], h @ params["value"]

        old, value = heads(params)
        advantage = reward - value
        center = mean(advantage.mean())
        spread = jnp.sqrt(mean(((advantage - center) ** 2).mean()))
        advantage = (advantage - center) / (spread + 1e-8)

        def loss(params: Any) -> Any:
            new, value = heads(params)
            ratio = jnp.exp(new - old)
            clipped = jnp.clip(ratio, 0.8, 1.2)
            policy = jnp.minimum(ratio * advantage, clipped * advantage).mean()
            return 0.5 * ((value - reward) ** 2).mean() - policy

        for _ in range(2):
            value, gradients = jax.value_and_grad(loss)(params)
            params, state = updated(optimizer, params, state, mean(gradients))
        return params, state, mean(value)

    run = over(step, (WHOLE, WHOLE, SPLIT, SPLIT, SPLIT), WHOLE, mesh_of(s=n))
    return run, params, optimizer.init(params)


@step_factory(X, ACTIONS, Y, X[::-1].copy())
def dqn_with_a_target_network(optimizer, n):
    """The target is a copy of the network every second step."""
    params = {"a": dense(4, 6), "b": dense(6, 3)}

    def step(params: Any, rest: Any, x: Any, action: Any, reward: Any, after: Any) -> Any:
        state, target, count = rest
        best = lax.stop_gradient(net(target, after).max(1))

        def loss(params: Any) -> Any:
            value = net(params, x)[jnp.arange(len(x)), action]
            return optax.huber_loss(value, reward + 0.9 * best).mean()

        value, gradients = jax.value_and_grad(loss)(params)
        params, state = updated(optimizer, params, state, mean(gradients))
        target = optax.periodic_update(params, target, count, 2)
        return params, (state, target, count + 1), mean(value)

    run = over(step, (WHOLE, WHOLE, *[SPLIT] * 4), WHOLE, mesh_of(s=n))
    target = jax.tree.map(lambda p: 0.5 * p, params)
    return run, params, (optimizer.init(params), target, jnp.int32(1))


@step_factory()
def diffusion_with_a_moving_average(optimizer, n):
    params = {"a": dense(5, 8), "b": dense(8, 4)}

    def step(params: Any, state: Any, rest: Any, x: Any, y: Any) -> Any:
        average, count = rest
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(9), count), lax.axis_index("s"))
        for_time, for_noise = jax.random.split(key)
        time = jax.random.uniform(for_time, (len(x), 1))
        noise = jax.random.normal(for_noise, x.shape)
        noisy = jnp.cos(time) * x + jnp.sin(time) * noise

        def loss(params: Any) -> Any:
            return jnp.mean((net(params, jnp.concatenate([noisy, time], 1)) - noise) ** 2)

        value, gradients = jax.value_and_grad(loss)(params)
        params, state = updated(optimizer, params, state, mean(gradients))
        average = optax.incremental_update(params, average, 0.1)
        return params, state, (average, count + 1), mean(value)

    run = over(step, (WHOLE, WHOLE, WHOLE, SPLIT, SPLIT), WHOLE, mesh_of(s=n))
    return run, params, optimizer.init(params), (params, jnp.int32(0))


@step_factory()
def a_variational_autoencoder_with_annealing(optimizer, n):
    params = {"mean": dense(4, 2), "spread": dense(4, 2), "back": dense(2, 4)}

    def step(params: Any, state: Any, count: Any, x: Any, y: Any) -> Any:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(4), count), lax.axis_index("s"))

        def loss(params: Any) -> Any:
            center, spread = x @ params["mean"], x @ params["spread"]
            z = center + jnp.exp(spread) * jax.random.normal(key, center.shape)
            divergence = 0.5 * (jnp.exp(2 * spread) + center**2 - 1 - 2 * spread).sum(1)
            weight = jnp.minimum(1.0, count / 10)
            return jnp.mean(((z @ params["back"] - x) ** 2).sum(1) + weight * divergence)

        value, gradients = jax.value_and_grad(loss)(params)
        return *updated(optimizer, params, state, mean(gradients)), count + 1, mean(value)

    run = over(step, (WHOLE, WHOLE, WHOLE, SPLIT, SPLIT), WHOLE, mesh_of(s=n))
    return run, params, optimizer.init(params), jnp.int32(0)


# Gradients of gradients, and of rows.


@in_shard_map()
def maml_over_tasks(optimizer, n, params, state, x, y):
    """A task is a row, of which two entries are points to learn from, and two are to test."""

    def of_task(params: Any, x: Any, y: Any) -> Any:
        points = lambda x: jnp.stack([x, x**2, jnp.sin(x), jnp.ones_like(x)], 1)
        error = lambda params, x: jnp.mean((net(params, points(x)) - y * x) ** 2)
        inner = jax.grad(error)(params, x[:2])
        there = jax.tree.map(lambda p, g: p - 0.05 * g, params, inner)
        return error(there, x[2:])

    loss = lambda params: jax.vmap(of_task, (None, 0, 0))(params, x, y).mean()
    return updated(optimizer, params, state, mean(jax.grad(loss)(params)))


def clipped_rows(params: Any, x: Any, y: Any) -> Any:
    """The sum of the rows' gradients, each clipped."""
    each = jax.vmap(jax.grad(mse), (None, 0, 0))(params, x[:, None], y[:, None])
    norms = jax.vmap(optax.tree.norm)(each)
    return jax.tree.map(lambda g: jnp.tensordot(jnp.minimum(1, 0.5 / norms), g, 1), each)


@step_factory()
def dp_sgd_with_noise_that_all_shards_share(optimizer, n):
    def step(params: Any, rest: Any, x: Any, y: Any) -> Any:
        state, key = rest
        key, now = jax.random.split(key)
        total = lax.psum(clipped_rows(params, x, y), "s")
        noise = optax.tree.random_like(now, params, jax.random.normal)
        gradients = jax.tree.map(lambda g, z: (g + 0.2 * z) / (n * len(x)), total, noise)
        params, state = updated(optimizer, params, state, gradients)
        return params, (state, key)

    params = first_params()
    run = over(step, (WHOLE, WHOLE, SPLIT, SPLIT), WHOLE, mesh_of(s=n))
    return run, params, (optimizer.init(params), jax.random.PRNGKey(3))


@step_factory()
def dp_sgd_with_noise_of_each_shard(optimizer, n):
    def step(params: Any, state: Any, count: Any, x: Any, y: Any) -> Any:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(8), count), lax.axis_index("s"))
        noise = optax.tree.random_like(key, params, jax.random.normal)
        total = jax.tree.map(
            lambda g, z: g + 0.2 / np.sqrt(n) * z, clipped_rows(params, x, y), noise
        )
        gradients = jax.tree.map(lambda g: g / (n * len(x)), lax.psum(total, "s"))
        return *updated(optimizer, params, state, gradients), count + 1

    params = first_params()
    run = over(step, (WHOLE, WHOLE, WHOLE, SPLIT, SPLIT), WHOLE, mesh_of(s=n))
    return run, params, optimizer.init(params), jnp.int32(0)


@step_factory()
def lora_beside_frozen_weights(optimizer, n):
    def step(adapter: Any, state: Any, frozen: Any, x: Any, y: Any) -> Any:
        full = lambda lora: {"a": frozen["a"] + lora["down"] @ lora["up"], "b": frozen["b"]}
        gradients = jax.grad(lambda lora: mse(full(lora), x, y))(adapter)
        return *updated(optimizer, adapter, state, mean(gradients)), frozen

    run = over(step, (WHOLE, WHOLE, WHOLE, SPLIT, SPLIT), WHOLE, mesh_of(s=n))
    # The gradient of one half is 0 at first.
    adapter = {"down": dense(4, 2), "up": jnp.zeros((2, 6))}
    return run, adapter, optimizer.init(adapter), first_params()


@step_factory()
def distillation_from_a_teacher_that_follows(optimizer, n):
    """The teacher's centre is a moving mean over all rows, as in DINO."""

    def step(params: Any, state: Any, rest: Any, x: Any, y: Any) -> Any:
        teacher, center = rest
        wanted = jax.nn.softmax((x @ teacher - center) / 0.5)
        loss = lambda params: optax.softmax_cross_entropy(x @ params, wanted).mean()
        value, gradients = jax.value_and_grad(loss)(params)
        params, state = updated(optimizer, params, state, mean(gradients))
        center = 0.9 * center + 0.1 * mean((x @ teacher).mean(0))
        teacher = optax.incremental_update(params, teacher, 0.05)
        return params, state, (teacher, center), mean(value)

    params = dense(4, 6)
    run = over(step, (WHOLE, WHOLE, WHOLE, SPLIT, SPLIT), WHOLE, mesh_of(s=n))
    return run, params, optimizer.init(params), (params[:, ::-1], jnp.zeros(6))


@step_factory()
def haiku_batch_norm_across_shards(optimizer, n):
    def forward(x: Any) -> Any:
        norm = hk.BatchNorm(True, True, 0.9, cross_replica_axis="s")
        return hk.Linear(1)(jnp.tanh(norm(hk.Linear(16, with_bias=False)(x), True)))[:, 0]

    model = hk.transform_with_state(forward)

    def one(params: Any, state: Any, stats: Any, x: Any, y: Any) -> Any:
        def loss(params: Any) -> Any:
            out, new = model.apply(params, stats, None, x)
            return jnp.mean((out - y) ** 2), new

        (value, stats), gradients = jax.value_and_grad(loss, has_aux=True)(params)
        return *updated(optimizer, params, state, mean(gradients)), stats, mean(value)

    run = jax.pmap(
        one, "s", in_axes=(None, None, None, 0, 0), out_axes=None, devices=jax.devices()[:n]
    )
    step = lambda *args: run(*args[:3], args[3].reshape(n, -1, 4), args[4].reshape(n, -1))
    init = lambda x: model.init(jax.random.key(0), x)
    params, stats = jax.pmap(init, "s", out_axes=None, devices=jax.devices()[:1])(X[None])
    params, stats = jax.device_get((params, stats))
    return step, params, optimizer.init(params), stats


# crossshard's own.

of_step("in parts", params="sharded")
of_step("over the batch", lambda p, b: clip_loss(p, b["x"], b["y"]), loss_over="batch", first=CLIP)
of_step(
    "of a masked mean by its weight",
    lambda p, b: ((net(p, b["x"]) - b["y"]) ** 2 * b["mask"]).sum() / b["mask"].sum(),
    weight=lambda b: b["mask"].sum(),
    batch=BATCH | {"mask": (np.arange(32) % 4 <= np.arange(32) // 8).astype(np.float32)},
)
of_step("in microbatches", accumulate_steps=4)
