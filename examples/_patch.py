"""A program with the changes of a patch, or as it was without them."""

import re


def patched(text: str, patch: str, *, back: bool = False) -> str:
    """The text after a unified diff; the one before it, if ``text`` is that after it.

    Raises:
      ValueError: a line of the text is not as the patch says.
    """
    old, new = ("+", "-") if back else ("-", "+")
    lines = text.splitlines()
    for hunk in reversed(re.split("^@@ ", patch, flags=re.MULTILINE)[1:]):  # the last line first
        ranges, *changes = hunk.splitlines()
        first, count = re.findall(rf"{re.escape(old)}(\d+),(\d+)", ranges)[0]
        of = slice(int(first) - 1, int(first) - 1 + int(count))
        if lines[of] != [line[1:] for line in changes if not line.startswith(new)]:
            raise ValueError(f"line {first} is not as the patch says: write it anew")
        lines[of] = [line[1:] for line in changes if not line.startswith(old)]
    return "".join(f"{line}\n" for line in lines)
