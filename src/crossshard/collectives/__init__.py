"""Sums over the shards and exchanges between them."""
