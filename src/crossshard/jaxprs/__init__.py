"""Analyses of jaxprs, and the abstract interpreter that they share."""
