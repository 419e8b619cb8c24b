"""Supervisor: starts the processes of a job, watches them, and ends them together."""
