"""Training programs as people have them, on one device and moved over to eight shards."""
