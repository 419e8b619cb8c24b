"""Text: format tables, sizes, times, counts and lists for people to read."""

from collections.abc import Sequence


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format rows as aligned columns for a terminal.

    >>> print(table(("kind", "sent"), [("all-reduce", size(2e6)), ("all-gather", "–")]))
    kind        sent
    all-reduce  2.00 MB
    all-gather  –
    """
    everything = [head, *rows]
    widths = [max(map(len, column)) for column in zip(*everything, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in everything
    )


def size(number: float) -> str:
    """Format a number of bytes to three digits.

    >>> size(16e9), size(1234), size(0)
    ('16.0 GB', '1.23 kB', '0 B')
    """
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if number >= 0.9995 * unit:
            return f"{_three(number / unit)} {name}"
    return f"{number:.0f} B"


def exact_size(number: float) -> str:
    """Format an exact number of bytes, to compare it with another.

    >>> exact_size(129031)
    '129,031 B'
    """
    return f"{number:,.0f} B"


def time(seconds: float) -> str:
    """Format seconds to three digits.

    >>> time(0.0123), time(4.5e-6)
    ('12.3 ms', '4.50 µs')
    """
    for unit, name in ((1, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= 0.9995 * unit:
            return f"{_three(seconds / unit)} {name}"
    return f"{_three(seconds * 1e9)} ns"


def count(number: int, one: str, several: str = "") -> str:
    """Format a number of things, with the noun in the singular or plural.

    >>> count(1, "device"), count(4096, "device"), count(2, "process", "processes")
    ('1 device', '4,096 devices', '2 processes')
    """
    return f"{number:,} {one if number == 1 else several or f'{one}s'}"


def listed(names: Sequence[str], most: int) -> str:
    """Join names with commas, and count those beyond the first few.

    >>> listed(["w", "v", "b"], 3), listed(["w", "v", "b"], 1)
    ('w, v, b', 'w and 2 more')
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _three(number: float) -> str:
    return f"{number:.{0 if number >= 99.95 else 1 if number >= 9.995 else 2}f}"
