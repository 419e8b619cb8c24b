"""The exit codes of the command, other than 128 and the number of the signal that stopped it."""

DONE = 0
FAILED = 1
REFUSED = 2
# Gradients that are not finite, or copies of the parameters that differ.
FAULTY = 3
STOPPED = 128
