"""What happens to a gradient between autodiff and the update."""
