"""Checkpoints: the whole state of a step on disk, restored on any number of shards."""
