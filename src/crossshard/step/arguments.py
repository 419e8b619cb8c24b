"""Says what to write where JAX refuses a loss for its collectives, or its shardings."""

from crossshard import _jax
from crossshard.errors import ArgumentError, AxisError, CrossshardError


def check_not_of_mesh(error: ValueError, axes: tuple[str, ...]) -> None:
    """Raise our own error if JAX refused a loss that shards arrays over the mesh.

    Raises:
      ArgumentError: it did.
    """
    if isinstance(error, CrossshardError) or not _jax.is_of_manual_axes(error):
        return
    raise ArgumentError(
        f"The loss shards an array over the mesh, which JAX refuses "
        f"({str(error).splitlines()[0]:.80}…): inside of a step {', '.join(axes)} are the shard "
        f"axes, and each shard runs the loss on its own, on the full parameters. Leave these "
        f"axes out of with_sharding_constraint and shard_map, pass no mesh to the latter, and "
        f"write flax.linen.unbox(params) for Linen's Partitioned boxes. For a model that is split "
        f"over another axis, write make_train_step(..., mesh=mesh, axis_name=...) with the shard "
        f"axes."
    ) from error


def check_not_of_shards(error: NameError, axes: tuple[str, ...]) -> None:
    """Raise our own error if JAX has not found the shard axis that a loss over the batch names.

    Raises:
      AxisError: it has not.
    """
    axis = _jax.unbound_axis(error, axes)
    if axis is None:
        return
    where = _jax.source_of_error(error)
    raise AxisError(
        f"The loss names the shard axis {axis!r}{f' ({where})' if where else ''}, and with "
        f"loss_over='batch' it is given the rows of all shards: x.mean(0) is the mean over the "
        f"batch. Leave out pmean, all_gather, axis_index and the axis_name of a batch norm; or "
        f"write loss_over='shard'."
    ) from error
