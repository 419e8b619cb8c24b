"""The gradient pipeline: the stages between autodiff and the optimizer, and their order."""
