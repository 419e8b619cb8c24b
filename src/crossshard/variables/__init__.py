"""NNX variables: discovery, binding to a trace, shared and per-shard values."""
