"""Shard contexts, mesh axes, groups, devices, and the placement of arrays."""
