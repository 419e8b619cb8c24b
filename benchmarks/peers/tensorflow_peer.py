"""TensorFlow's part in the benchmarks: MirroredStrategy over logical CPU devices.

Run by an interpreter that has tensorflow, so it imports nothing of crossshard; what is said to it
and what it answers is told in ../peer.py. The optimizer is that of tf.compat.v1, whose update is
one fused kernel; Keras's, op by op, takes several times as long.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf  # type: ignore[import-not-found,import-untyped]

_Adam: Any = tf.compat.v1.train.AdamOptimizer


class _AdamW(_Adam):
    """The fused Adam with decoupled weight decay, which tf.compat.v1 lacks."""

    def __init__(self, decay: float, *arguments: float) -> None:
        super().__init__(*arguments)
        self._decay = decay

    def _resource_apply_dense(self, grad: Any, handle: Any) -> Any:
        with tf.control_dependencies([handle.assign_sub(self._decay * handle)]):
            return super()._resource_apply_dense(grad, handle)


class Replicas:
    """Mirrored variables, gradients for each replica, and the compiled step over them.

    Args:
      problem: shapes, scales of the gradients and numbers of the optimizer.
      strategy: over as many devices as there are scales.
      decays: whether weights decay.
    """

    def __init__(self, problem: dict, strategy: Any, decays: bool) -> None:
        self._strategy = strategy
        numbers = (problem["learning_rate"], problem["b1"], problem["b2"], problem["eps"])
        with strategy.scope():
            self._variables = [tf.Variable(tf.ones(shape)) for shape in problem["shapes"]]
            decay = problem["learning_rate"] * problem["weight_decay"]
            optimizer = _AdamW(decay, *numbers) if decays else _Adam(*numbers)
        self._gradients = strategy.experimental_distribute_values_from_function(
            lambda context: _gradients(problem, context.replica_id_in_sync_group)
        )

        def step_of_replica(gradients: Any) -> None:
            optimizer.apply_gradients(zip(gradients, self._variables, strict=True))

        @tf.function
        def step(gradients: Any) -> tf.Tensor:
            strategy.run(step_of_replica, args=(gradients,))
            return tf.constant(0)

        self._compiled: Callable[[Any], tf.Tensor] = step

    def step(self) -> None:
        """Reduce and update, and wait until it is done."""
        self._compiled(self._gradients).numpy()

    def sample(self) -> list[float]:
        """The last number of every array, on the last replica."""
        locals_of = self._strategy.experimental_local_results
        return [float(locals_of(variable)[-1][-1, -1]) for variable in self._variables]


def _gradients(problem: dict, replica: int) -> list[tf.Tensor]:
    # The v1 optimizers sum over the replicas; dividing here, ahead of time, makes it the mean.
    scales = [scale / len(problem["scales"]) for scale in problem["scales"][replica]]
    return [
        tf.reshape(scale * tf.linspace(-1.0, 1.0, tf.reduce_prod(shape)), shape)
        for scale, shape in zip(scales, problem["shapes"], strict=True)
    ]


def main() -> None:
    """Answer every question; a variant is made when it is first asked for."""
    # Answers go where stdout went; whatever else is printed must not stand between them.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    problem = json.loads(sys.argv[1])
    shards = len(problem["scales"])
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration() for _ in range(shards)],
    )
    strategy = tf.distribute.MirroredStrategy(
        [f"CPU:{index}" for index in range(shards)],
        # The fastest of the three that there are; the default takes about twice as long on CPUs.
        cross_device_ops=tf.distribute.ReductionToOneDevice(),
    )
    replicas: dict[str, Replicas] = {}
    for line in sys.stdin:
        question = json.loads(line)
        variant = question["variant"]
        if variant == "versions":
            answer: dict = {"versions": {"TensorFlow": tf.__version__}}
        else:
            if variant not in replicas:
                replicas[variant] = Replicas(problem, strategy, decays=variant == "adamw")
            began = time.perf_counter()
            for _ in range(question["steps"]):
                replicas[variant].step()
            seconds = time.perf_counter() - began
            answer = {"seconds": seconds, "sample": replicas[variant].sample()}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
