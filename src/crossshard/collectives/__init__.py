"""Collectives over the shards: sums, all_to_all and collective_permute."""
