"""Aggregators: how the shards' gradients are summed."""
