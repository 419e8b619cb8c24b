"""The whole training step: loss, gradients, reduction, sharded weight update."""
