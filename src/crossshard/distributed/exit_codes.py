"""The exit codes of processes that leave because of another one; outside those of sysexits.h."""

# Another process died, failed, or left while it was needed.
PROCESS_LOST = 81
# Another process does not move.
PROCESS_STALLED = 82
