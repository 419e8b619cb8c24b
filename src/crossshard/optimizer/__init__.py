"""CrossShardOptimizer, its two idioms and its slots."""
