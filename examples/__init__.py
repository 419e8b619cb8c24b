"""Programs that use crossshard as its users do: by its public names."""
