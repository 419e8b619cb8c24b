"""Diagnosis: what looks wrong with this machine and with JAX on it, before a run."""
