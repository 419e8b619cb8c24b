"""NNX variables: found, handed in and out of a trace, one value for all shards or one for each."""
