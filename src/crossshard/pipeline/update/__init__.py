"""Update: from a reduced gradient to new parameters, replicated, sharded, or by owners."""
