"""Stages: from a local gradient to a reduced one, a file each."""
