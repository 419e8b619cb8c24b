"""All cases of the table of losses, entered by the files that hold them."""

from tests.losses import comparing, means, ratios, sequences, wrong_weights  # noqa: F401
from tests.losses.cases import BREAKS, CASES, REFUSED, RIGHT, WRONG

__all__ = ["CASES", "OUTCOMES", "first_sentence"]

OUTCOMES = (RIGHT, REFUSED, WRONG, BREAKS)


def first_sentence(message: str) -> str:
    """Of an error, without the line of the loss."""
    return message.partition("\n")[0].split(". ")[0]
