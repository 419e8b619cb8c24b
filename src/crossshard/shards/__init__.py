"""Where am I? Shard contexts, axes, groups and devices."""
