"""Update: from a reduced gradient to new parameters, in full or in parts."""
