"""Jaxprs read for what holds of their values: one walker, and the analyses that use it."""
