"""What the loss of a step is over: the rows of shards, the whole batch, or virtual shards."""
