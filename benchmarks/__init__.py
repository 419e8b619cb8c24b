"""Timing ours against others, in turn within one run: `python -m benchmarks --help`."""
