"""The way of a gradient: every stage, and the order in which they run."""
