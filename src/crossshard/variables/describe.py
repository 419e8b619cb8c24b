"""The description of a variable in errors."""

from flax import nnx


def describe_variable(variable: nnx.Variable) -> str:
    """``Param float32[3,4]``, with its name if it has one."""
    value = variable.get_raw_value()
    name = variable.get_metadata("name", None)
    kind = type(variable).__name__ + (f" {name!r}" if name else "")
    if not hasattr(value, "dtype"):
        return f"{kind} ({type(value).__name__})"
    return f"{kind} {value.dtype}[{','.join(map(str, value.shape))}]"
