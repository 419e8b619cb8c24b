"""Model: how a step keeps a model: its trained and frozen arrays, its other state, their layout."""
