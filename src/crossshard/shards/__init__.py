"""Where am I? Shard contexts, axes, groups, devices, and the runners."""
