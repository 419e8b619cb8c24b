"""What optimizers and rates of TensorFlow 1 do in twelve steps: python tf1_optimizers.py"""

import json

import numpy as np
import tensorflow.compat.v1 as tf

STEPS, RATE = 12, 0.1
SIZES = [1.0, 0.1, 1e-3, 1e-6]  # of the gradients

OPTIMIZERS = {
    "sgd": lambda: tf.train.GradientDescentOptimizer(RATE),
    "momentum": lambda: tf.train.MomentumOptimizer(RATE, 0.9),
    "nesterov": lambda: tf.train.MomentumOptimizer(RATE, 0.9, use_nesterov=True),
    "adam": lambda: tf.train.AdamOptimizer(RATE),
    "adam, epsilon 1e-3": lambda: tf.train.AdamOptimizer(RATE, epsilon=1e-3),
    "rmsprop": lambda: tf.train.RMSPropOptimizer(RATE),
    "rmsprop, momentum": lambda: tf.train.RMSPropOptimizer(RATE, 0.9, 0.9, epsilon=1.0),
    "adagrad": lambda: tf.train.AdagradOptimizer(RATE),
}
RATES = {
    "piecewise": lambda step: tf.train.piecewise_constant(step, [3, 6], [1.0, 0.1, 0.01]),
    "exponential": lambda step: tf.train.exponential_decay(1.0, step, 4, 0.5, staircase=True),
    "polynomial": lambda step: tf.train.polynomial_decay(1.0, step, 8, 0.1, power=2.0),
    "cosine": lambda step: tf.train.cosine_decay(1.0, step, 8, alpha=0.1),
}


def gradients():
    """One for each step, of four elements that differ in size."""
    return (np.random.default_rng(0).normal(size=(STEPS, 4)) * SIZES).astype(np.float32)


def updated(make):
    """Four numbers, at first 0, after each step."""
    with tf.Graph().as_default(), tf.Session() as session:
        w = tf.get_variable("w", initializer=np.zeros(4, np.float32))
        gradient = tf.placeholder(tf.float32, 4)
        step = make().apply_gradients([(gradient, w)])
        session.run(tf.global_variables_initializer())
        found = []
        for given in gradients():
            session.run(step, {gradient: given})
            found.append(session.run(w).tolist())
    return found


def rates(make):
    """The rate of each step."""
    with tf.Graph().as_default(), tf.Session() as session:
        step = tf.placeholder(tf.int64, [])
        rate = make(step)
        return [float(session.run(rate, {step: number})) for number in range(STEPS)]


if __name__ == "__main__":
    tf.disable_v2_behavior()
    tf.enable_resource_variables()
    found = {name: updated(make) for name, make in OPTIMIZERS.items()}
    print(json.dumps({**found, **{name: rates(make) for name, make in RATES.items()}}))
