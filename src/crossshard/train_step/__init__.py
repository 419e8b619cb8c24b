"""The whole step, built by one call: loss, gradients, reduction, sharded weight update."""
