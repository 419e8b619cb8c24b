"""Diagnosis: what looks wrong with this machine and with JAX on it, before a run.

``crossshard.tools`` exports ``doctor``, the ``Diagnosis`` that it returns, and what that holds.
"""
