"""The exit codes of the command."""

FINE = 0
BROKEN = 1
REFUSED = 2
# 128 plus the number of the signal, as in shells.
INTERRUPTED = 130
NOT_READ = 141
