"""Options: the checked values of the pipeline's optional stages."""

from typing import Any

from crossshard.errors import ArgumentError
from crossshard.gradients.scalars import dtype_among
from crossshard.pipeline.loss_scale import check_loss_scale
from crossshard.pipeline.masters import check_master_dtype
from crossshard.pipeline.metrics import check_metrics
from crossshard.pipeline.moving_average import check_ema
from crossshard.pipeline.nonfinite import check_nonfinite


def check_options(
    *,
    reduce_dtype: Any = None,
    loss_scale: Any = None,
    master_dtype: Any = None,
    ema: Any = None,
    metrics: Any = (),
    nonfinite: Any = None,
) -> dict[str, Any]:
    """The fields of a ``Pipeline`` for the options that are not left out.

    Raises:
      ArgumentError, ArgumentTypeError: an invalid value.
    """
    checked = {
        "reduce_dtype": _check_reduce_dtype(reduce_dtype),
        "loss_scale": check_loss_scale(loss_scale),
        "master_dtype": check_master_dtype(master_dtype),
        "ema": check_ema(ema),
        "metrics": check_metrics(metrics),
        "nonfinite": check_nonfinite(nonfinite),
    }
    return {name: value for name, value in checked.items() if value}


def _check_reduce_dtype(dtype: Any) -> Any:
    if dtype is None:
        return None
    found = dtype_among(dtype, ("bfloat16", "float32"))
    if found is not None:
        return found
    why = _OF_FLOAT16 if dtype_among(dtype, ("float16",)) else ""
    raise ArgumentError(
        f"reduce_dtype must be bfloat16, or float32 for gradients of 64 bits; got "
        f"{dtype!r:.60}.{why}"
    )


_OF_FLOAT16 = " Gradients below 6e-8 would be zero in float16, and a sum above 65504 infinite."
