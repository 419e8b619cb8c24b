"""All cases of the table of losses, entered by the files that hold them."""

from tests.losses import comparing, means, ratios, sequences, wrong_weights  # noqa: F401
from tests.losses.cases import CASES

__all__ = ["CASES"]
