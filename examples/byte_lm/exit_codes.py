"""The exit codes of the command line."""

DONE = 0
FAILED = 1
REFUSED = 2
# 128 and the number of SIGINT, as shells count.
INTERRUPTED = 130
