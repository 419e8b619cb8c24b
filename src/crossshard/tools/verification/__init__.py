"""Verification: a user's step on one and on many shards, and what is wrong with it, in words."""
