"""Verification: runs a user's step on one and on many shards, and says what is wrong with it."""
