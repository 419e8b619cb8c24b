"""Progress of a benchmark, on stderr: what is measured, its rounds, and notes."""

import sys


class Screen:
    """Says what is measured, and keeps notes for the page.

    Args:
      rounds: the rounds of each comparison.

    Attributes:
      notes: the notes since the last clear.
    """

    def __init__(self, rounds: int) -> None:
        self.notes: list[str] = []
        self._rounds = rounds

    def tell(self, what: str) -> None:
        """Print the current work."""
        print(f"{what} …", file=sys.stderr, flush=True)

    def round(self, number: int) -> None:
        """Show that a round is finished, where a line can be written over."""
        if sys.stderr.isatty():
            end = "\n" if number == self._rounds else "\r"
            print(f"round {number} of {self._rounds}", end=end, file=sys.stderr, flush=True)

    def note(self, line: str) -> None:
        """Print a line once, and keep it for the report."""
        if line not in self.notes:
            self.notes.append(line)
            print(line, file=sys.stderr, flush=True)
