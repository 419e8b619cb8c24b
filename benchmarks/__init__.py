"""Benchmarks of crossshard against baselines, interleaved: `python -m benchmarks --help`."""
