"""A small language model over bytes, trained over shards: `python -m examples.byte_lm --help`."""
