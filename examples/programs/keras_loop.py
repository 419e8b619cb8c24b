"""A Keras model in a JAX training loop: `stateless_call`, batch norm, `jax.jit`."""

import os

os.environ["KERAS_BACKEND"] = "jax"

import keras
import numpy as np
import optax

import crossshard

OPTIMIZER = optax.adam(1e-3)


def make_model():
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.layers.Input((8, 8, 1)),
            keras.layers.Conv2D(8, 3, use_bias=False),
            keras.layers.BatchNormalization(momentum=0.9),
            keras.layers.ReLU(),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(10),
        ]
    )


model = make_model()
loss_object = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def compute_loss_and_updates(trainable_variables, non_trainable_variables, batch):
    y_pred, non_trainable_variables = model.stateless_call(
        trainable_variables, non_trainable_variables, batch["x"], training=True
    )
    return loss_object(batch["y"], y_pred), non_trainable_variables


def data(steps):
    rng = np.random.default_rng(0)
    for _ in range(steps):
        y = rng.integers(10, size=32)
        x = rng.normal(size=(32, 8, 8, 1)) + y[:, None, None, None] / 5
        yield {"x": x.astype(np.float32), "y": y}


def main(optimizer=OPTIMIZER, steps=4):
    trainable = [v.value for v in model.trainable_variables]
    non_trainable = [v.value for v in model.non_trainable_variables]
    step = crossshard.make_train_step(
        compute_loss_and_updates, optimizer, model_state="mean", loss_over="batch"
    )
    state = step.init(trainable, model_state=non_trainable)

    for batch in data(steps):
        state, metrics = step(state, batch)
        print(f"loss {metrics['loss']:.4f}")
    return step.model(state)


if __name__ == "__main__":
    main()
