"""A TPU program of TensorFlow 1, with its collective emulated: python tf1_optimization.py"""

import json
from unittest import mock

import numpy as np
import tensorflow.compat.v1 as tf
from tensorflow.python.tpu import tpu_function
from tensorflow.python.tpu.ops import tpu_ops

SHARDS, STEPS, WARMUP = 8, 20, 5


class AdamWeightDecayOptimizer(tf.train.Optimizer):
    """Adam without bias correction, with decay of the weights beside the gradient."""

    def __init__(self, learning_rate, weight_decay_rate=0.01, exclude=("layer_norm", "bias")):
        super().__init__(use_locking=False, name="AdamWeightDecayOptimizer")
        self._rate, self._decay, self._exclude = learning_rate, weight_decay_rate, exclude

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        """One update; `global_step` is left to the caller."""
        updates = []
        for gradient, variable in grads_and_vars:
            if gradient is None:
                continue
            m = self._zeros_slot(variable, "m", self._name)
            v = self._zeros_slot(variable, "v", self._name)
            next_m = 0.9 * m + 0.1 * gradient
            next_v = 0.999 * v + 0.001 * gradient**2
            update = next_m / (tf.sqrt(next_v) + 1e-6)
            if not any(part in variable.op.name for part in self._exclude):
                update += self._decay * variable
            with tf.control_dependencies([update]):
                updates += [m.assign(next_m), v.assign(next_v)]
                updates += [variable.assign_sub(self._rate * update)]
        return tf.group(*updates)


def create_optimizer(
    loss, init_lr, num_train_steps, num_warmup_steps, use_tpu, make=AdamWeightDecayOptimizer
):
    """An operation that takes a training step."""
    global_step = tf.train.get_or_create_global_step()
    rate = tf.train.polynomial_decay(init_lr, global_step, num_train_steps, end_learning_rate=0.0)
    step = tf.cast(global_step, tf.float32)
    rate = tf.where(step < num_warmup_steps, init_lr * step / num_warmup_steps, rate)

    optimizer = make(rate)
    if use_tpu:
        optimizer = tf.tpu.CrossShardOptimizer(optimizer)

    variables = tf.trainable_variables()
    gradients = tf.gradients(loss, variables)
    gradients, _ = tf.clip_by_global_norm(gradients, clip_norm=1.0)
    train_op = optimizer.apply_gradients(list(zip(gradients, variables, strict=True)))
    with tf.control_dependencies([train_op]):
        return global_step.assign_add(1).op


def data():
    """64 rows of 4 numbers, and what to say of each; rows differ in size from shard to shard."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 4)) * np.repeat(np.linspace(0.5, 2, 8), 8)[:, None]
    return x.astype(np.float32), (3 * np.sin(x[:, 0]) + x[:, 1]).astype(np.float32)


def parameters():
    """The first values, by name."""
    rng = np.random.default_rng(1)
    shapes = {"dense/kernel": (4, 8), "dense/bias": 8, "out/kernel": (8, 1), "out/bias": 1}
    found = {name: 0.5 * rng.normal(size=shape) for name, shape in shapes.items()}
    return {**found, "layer_norm/scale": np.ones(8), "layer_norm/bias": np.zeros(8)}


def network(x):
    """A layer, a norm, a layer."""
    of = {
        name: tf.get_variable(name, initializer=np.float32(v)) for name, v in parameters().items()
    }
    hidden = tf.tanh(x @ of["dense/kernel"] + of["dense/bias"])
    mean, variance = tf.nn.moments(hidden, axes=[1], keepdims=True)
    normal = (hidden - mean) * tf.math.rsqrt(variance + 1e-6)
    hidden = normal * of["layer_norm/scale"] + of["layer_norm/bias"]
    return (hidden @ of["out/kernel"] + of["out/bias"])[:, 0]


def train(use_tpu, make, init_lr):
    """Twenty steps on the same 64 rows: the losses, and the parameters at the end."""
    sent, received = [], []

    def cross_replica_sum(gradient, group_assignment=None):
        # It runs on TPUs alone. All shards have the same variables, so one graph serves for all:
        # it gives each shard's gradients in turn, and gets their sums.
        sent.append(gradient)
        received.append(tf.placeholder(gradient.dtype, gradient.shape))
        return received[-1]

    with (
        tf.Graph().as_default(),
        tf.Session() as session,
        tpu_function.tpu_shard_context(SHARDS if use_tpu else 1),
        mock.patch.object(tpu_ops, "cross_replica_sum", cross_replica_sum),
    ):
        x, y = tf.placeholder(tf.float32, [None, 4]), tf.placeholder(tf.float32, [None])
        loss = tf.reduce_mean((network(x) - y) ** 2)
        train_op = create_optimizer(loss, init_lr, STEPS, WARMUP, use_tpu, make)
        session.run(tf.global_variables_initializer())
        losses = []
        for _ in range(STEPS):
            if use_tpu:
                rows = zip(*(np.split(array, SHARDS) for array in data()), strict=True)
                shards = [session.run([loss, *sent], {x: a, y: b}) for a, b in rows]
                each, *sums = (sum(of_shards) for of_shards in zip(*shards, strict=True))
                losses.append(float(each / SHARDS))
                session.run(train_op, dict(zip(received, sums, strict=True)))
            else:
                found, _ = session.run([loss, train_op], dict(zip((x, y), data(), strict=True)))
                losses.append(float(found))
        values = session.run({v.op.name: v for v in tf.trainable_variables()})
    return {"losses": losses, "parameters": {name: v.tolist() for name, v in values.items()}}


if __name__ == "__main__":
    tf.disable_v2_behavior()
    tf.enable_resource_variables()
    kinds = {
        "adam": (AdamWeightDecayOptimizer, 0.05),
        "sgd": (tf.train.GradientDescentOptimizer, 0.05),
    }
    runs = {"one device": False, "eight shards": True}
    trained = {
        f"{name}, {where}": train(use_tpu, *kind)
        for name, kind in kinds.items()
        for where, use_tpu in runs.items()
    }
    print(json.dumps(trained))
