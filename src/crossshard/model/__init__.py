"""Model: the trained and frozen arrays of a model, its other state, and their layout on a mesh."""
