"""A step run once per shard: shard, batch_parallel, replicate and rewrite."""
