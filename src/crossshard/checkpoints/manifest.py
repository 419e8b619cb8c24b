"""Manifest: what a checkpoint holds, as JSON, and what tells its step from others.

It is checked before anything else of a checkpoint is read. It names the options of the step, and of
the step's optimizer the types of the state and the operations of the update.
"""

import dataclasses
import enum
import itertools
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import Literal

from crossshard import _jax
from crossshard._check import typed
from crossshard._hash import checksum, sha256
from crossshard.checkpoints.data import Data
from crossshard.checkpoints.folder import MOST_BYTES, Damaged, read_json
from crossshard.checkpoints.storage import Leaf
from crossshard.errors import CheckpointMismatchError
from crossshard.gradients.status import Reduction, inside_optimizer
from crossshard.jaxprs.walk import constants, jaxprs_within, opened
from crossshard.model.layout import StateLayout
from crossshard.model.state import TrainState
from crossshard.pipeline.aggregator import Aggregator
from crossshard.pipeline.stage import Stage
from crossshard.pipeline.stages.preprocess import Preprocess
from crossshard.pipeline.update.optimize import takes_loss
from crossshard.step.function import StepConfig
from crossshard.step.losses import written
from crossshard.step.state import OPTIMIZER, PREPROCESS

VERSION = 6
# All that version 3 tells of an option: that it was on, or that the loss was not over the batch.
ON, NOT_BATCH = "on", "not batch"
FILE = "manifest.json"
# A number on disk may not ask for all memory: arrays with a row for each shard have so many rows.
_MOST_SHARDS = 1 << 16


@dataclasses.dataclass(frozen=True)
class Update:
    """What tells the update of an optimizer or a preprocessor from others."""

    states: list[str]  # the types of the states that its own state consists of
    operations: str  # a hash of its operations
    equations: str  # a hash of its operations with their numbers
    words: list[str]  # each operation with its numbers once, in words
    # Hashes of which arrays each operation takes, and of constants that are arrays, with the parts
    # that are taken of them. Empty of a user's own stage, and in a checkpoint of crossshard 0.3.0.
    operands: str = ""
    arrays: str = ""


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """What tells a step from others, as far as the meaning of its state depends on it."""

    # The update of the wrapped optimizer, without master weights and moving average, and those of
    # other options that are optimizers or stages.
    updates: dict[str, Update]
    # Each option that changes what a step does, in words, or ``None`` if it is off. An option that
    # is not here is unknown to the version that wrote it.
    options: dict[str, str | None]
    # Only the same two versions trace an update alike.
    jax: str
    optax: str


@dataclasses.dataclass(frozen=True)
class WrittenLeaf:
    """What the manifest says of one array: where it is in the state, and what is on disk."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    hash: str


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds."""

    # The name of its folder, and the number of steps taken.
    number: int
    step: int
    # How many shards wrote it, and the groups of them whose parameters differ.
    shards: int
    groups: list[list[int]] | None
    # The implementation of the random key.
    rng: str
    fingerprint: Fingerprint
    leaves: list[WrittenLeaf]
    # What the user saved beside the state.
    data: Data

    def to_json(self, hashes: Sequence[str] = ()) -> dict[str, Any]:
        """Return it as it is written, with the hashes of its arrays if these are known."""
        body = {"version": VERSION, **dataclasses.asdict(self)}
        for leaf, found in zip(body["leaves"], hashes, strict=False):
            leaf["hash"] = found
        return {**body, "sha256": sha256(body)}


def manifest_of(
    layout: StateLayout,
    state: TrainState,
    leaves: Sequence[Leaf],
    fingerprint: Fingerprint,
    data: Data,
    number: int = 0,
    step: int = 0,
) -> Manifest:
    """Return the manifest of a state whose leaves are these, without hashes."""
    written = [WrittenLeaf(leaf.path, leaf.on_disk.shape, leaf.dtype, "") for leaf in leaves]
    of_state = layout.number_of_shards, groups_of(layout), str(state.rng_impl)
    return Manifest(number, step, *of_state, fingerprint, written, data)


def groups_of(layout: StateLayout) -> list[list[int]] | None:
    """Return the groups whose parameters differ, as a manifest has them."""
    return None if layout.groups is None else [list(group) for group in layout.groups.groups]


def read_manifest(file: Path, number: int) -> Manifest:
    """Read the manifest of a checkpoint, which nobody vouches for.

    Raises:
      CheckpointMismatchError: it is whole, and another version of crossshard wrote it.
      Damaged: it is not whole.
    """
    try:
        body = read_json(file, MOST_BYTES)
    except FileNotFoundError:
        raise Damaged("it has no manifest") from None
    except (OSError, ValueError) as error:
        raise Damaged(f"the manifest cannot be read ({error!s:.100})") from None
    return as_manifest(body, file, number)


def as_manifest(body: dict[str, Any], file: Path, number: int) -> Manifest:
    """Return the manifest that was read from a file; raise as ``read_manifest`` does."""
    checksum = body.pop("sha256", None)
    if checksum != sha256(body):
        raise Damaged("the manifest does not have the checksum that it was written with")
    form = body.pop("version", None)
    if form not in (3, 4, 5, VERSION):
        raise CheckpointMismatchError(
            f"{file} has version {form!r:.20}, and this crossshard reads versions 3 to "
            f"{VERSION}. Install the crossshard that wrote it, or choose another folder."
        )
    for key in sorted(body.keys() ^ {field.name for field in dataclasses.fields(Manifest)}):
        what = "an unknown key" if key in body else "no key"
        raise CheckpointMismatchError(
            f"{file} has {what} {key!r:.60}, so something else wrote it. Choose another folder."
        )
    try:
        if form < 5:
            body["data"] = dataclasses.asdict(Data(body["data"]))
        if form == 3:
            body["fingerprint"] = _of_version_3(**body["fingerprint"])
        if form < VERSION:
            body["leaves"] = _of_weighted_sums(body["leaves"], **body["fingerprint"])
            body["fingerprint"] = _of_version_5(**body["fingerprint"])
        manifest: Manifest = typed(Manifest, body)
        paths = [leaf.path for leaf in manifest.leaves]
        manifest.data.check()
        if manifest.shards > _MOST_SHARDS or len({*paths}) < len(paths):
            raise ValueError("It has too many shards, or a path twice.")
    except (ValueError, TypeError, RecursionError):
        raise Damaged("the manifest has values of a wrong type") from None
    if manifest.number != number:
        raise Damaged(f"its manifest is that of checkpoint {manifest.number}")
    return manifest


def _of_version_3(update: Any, preprocess: Any, options: Any, **others: Any) -> dict[str, Any]:
    """Return a fingerprint of crossshard 0.2.0 as it is written now."""
    updates = {"optimizer": update, "preprocess": preprocess}
    # Version 3 told more of these options.
    options = {**options}
    options |= {name: ON for name in ("loss_scale", "weight") if options.get(name) is not None}
    of_batch = "loss_over='batch'"
    if of_batch in options:
        options["loss_over"] = NOT_BATCH if options.pop(of_batch) is None else "batch"
    updates = {name: each for name, each in updates.items() if each is not None}
    return {"updates": updates, "options": options, **others}


def _of_weighted_sums(leaves: Any, options: Any, **others: Any) -> list[Any]:
    """Rename what aggregators of crossshard 0.3.0 keep of weighted sums, so that it is dropped.

    They now keep parts of the mean.
    """
    del others
    if options.get("weight") is None and options.get("nonfinite") != "quarantine":
        return leaves
    one = lambda path: path.replace(".opt_state.aggregate", ".opt_state.aggregate_of_sums")
    return [{**leaf, "path": one(leaf["path"])} for leaf in leaves]


def _of_version_5(updates: Any, **others: Any) -> dict[str, Any]:
    """Return a fingerprint of crossshard 0.3.0 as it is written now."""
    less = {"operands": "", "arrays": ""}
    return {"updates": {name: {**less, **each} for name, each in dict(updates).items()}, **others}


# What tells a step from others.


def fingerprint(config: StepConfig, params: Any) -> Fingerprint:
    """Return what tells a step from others, given the types of one set of parameters."""
    options = compared(config).items()
    told = [each for name, value in options for each in _told(name, value, params)]
    updates = {name: each for name, each in told if isinstance(each, Update)}
    words = {name: each for name, each in told if not isinstance(each, Update)}
    return Fingerprint(updates, words, jax.__version__, version("optax"))


def compared(config: StepConfig) -> dict[str, Any]:
    """Return the options that a restore compares, by the names that the user passes them under.

    The other options do not change what a state becomes, such as names, metrics, and the placement
    of arrays, which a restore may change. Or they are the user's code, with what it takes and
    returns. Or the manifest or the arrays tell them, such as the groups, and what is trained.
    """
    pipeline = config.pipeline
    return {
        **written(config.loss),
        **pipeline.written(),
        OPTIMIZER: pipeline.inner,
        "reduction": pipeline.reduction,
        "gather_dtype": config.gather_dtype,
    }


def _told(name: str, value: Any, params: Any) -> Iterator[tuple[str, str | Update | None]]:
    """Yield an option in words, and what it consists of, by names; ``None`` if it is off."""
    if isinstance(value, optax.GradientTransformation):
        yield name, _of_update(value, params)
    elif name == PREPROCESS and value is not None:
        yield name, "on"
        yield name, _of_stage(value, params)
    elif name == "weight" and callable(value) and not _is_ours(value):
        # One function may be made in several places, and so have several names.
        yield name, "a function"
    elif isinstance(value, Aggregator):
        told, kind = str(value.describe()), type(value).__name__
        is_told = _is_ours(value) or kind in told
        yield name, (told if is_told else f"{told} of {kind}") or None
        # Attributes that are no fields may count calls, or tell a process from others.
        for field in () if _is_ours(value) else _fields(value):
            if field.compare:
                yield f"{name}.{field.name}", _in_words(getattr(value, field.name))
    elif (_is_ours(value) or isinstance(value, Stage)) and _fields(value):
        # One says nonfinite="skip", and Nonfinite("skip", max_consecutive=5).
        first, *others = _fields(value)
        yield from _told(name, getattr(value, first.name), params)
        for field in others:
            yield from _told(f"{name}.{field.name}", getattr(value, field.name), params)
    else:
        yield name, _in_words(value)


def _fields(value: Any) -> tuple[Any, ...]:
    return dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()


def _is_ours(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] == "crossshard"


def _in_words(value: Any) -> str | None:
    if value is None or isinstance(value, bool):
        return "on" if value else None
    if isinstance(value, Reduction):
        return value.name
    if isinstance(value, dict):
        return ", ".join(
            sorted(f"{_in_words(key)}: {_in_words(each)}" for key, each in value.items())
        )
    if isinstance(value, tuple | list):
        return ", ".join(str(_in_words(each)) for each in value)
    if isinstance(value, _PLAIN):
        return str(value)
    # An address, which the text of an object may have, differs between processes.
    return f"by {getattr(value, '__qualname__', type(value).__name__)}"


def _of_update(optimizer: Any, params: Any) -> Update:
    loss = {"value": jax.ShapeDtypeStruct((), jnp.float32)} if takes_loss(optimizer) else {}
    with inside_optimizer():
        state = jax.eval_shape(optimizer.init, params)
        jaxpr = jax.make_jaxpr(optimizer.update)(params, state, params, **loss)
    found, taken = list(_equations(jaxpr)), list(_operands(jaxpr))
    # Each is asked only once where it comes from, which takes longer than all else.
    kinds = {words: equation for _, words, equation in found}
    return Update(
        states=list(_types(state)),
        operations=sha256([operation for operation, _, _ in found]),
        equations=sha256([words for _, words, _ in found]),
        words=[words + _maker(equation) for words, equation in kinds.items()],
        operands=sha256([[each if type(each) is int else -1 for each in one] for one in taken]),
        arrays=sha256([each for one in taken for each in one if type(each) is str]),
    )


def _of_stage(stage: Stage, params: Any) -> Update:
    if isinstance(stage, Preprocess):
        return _of_update(stage.transformation, params)
    # What a user's own stage computes cannot be traced outside of a step.
    numbers = [f"{k}={v}" for k, v in sorted(vars(stage).items()) if type(v) in _NUMBERS]
    return Update([type(stage).__qualname__], "", sha256(numbers), numbers)


_NUMBERS = (int, float)
# A bool is an int.
_PLAIN = (*_NUMBERS, complex, str, enum.Enum, np.generic, np.dtype)


def _equations(jaxpr: Any) -> Iterator[tuple[str, str, Any]]:
    """Yield each equation in words, without its numbers and with them, and the equation itself."""
    body = opened(jaxpr)
    values = dict(zip(body.constvars, constants(jaxpr), strict=True))
    for equation in body.eqns:
        name, types = equation.primitive.name, [str(out.aval) for out in equation.outvars]
        given = [
            _number(atom.val if isinstance(atom, Literal) else values.get(atom))
            for atom in equation.invars
        ]
        told = [f"{k}={v}" for k, v in equation.params.items() if type(v) in _NUMBERS]
        if any(given):
            told = [each or "x" for each in given] + told
        numbers = f"({', '.join(told)})" if told else ""
        dtypes = "/".join(dict.fromkeys(each.split("[")[0] for each in types))
        yield f"{name} {types}", f"{name}{numbers} of {dtypes}", equation
        for inner in jaxprs_within(equation):
            yield from _equations(inner)


def _operands(jaxpr: Any) -> Iterator[list[int | str]]:
    """Yield what each equation takes, and what is returned.

    An array is told by its place in the order of definition, a constant by ``_constant``, and
    integers that choose parts or axes of arrays as text.
    """
    body, places = opened(jaxpr), itertools.count()
    known: dict[Any, Any] = dict(zip(body.invars, places, strict=False))
    known |= zip(body.constvars, map(_constant, constants(jaxpr)), strict=True)
    told = lambda atoms: [
        _constant(atom.val) if isinstance(atom, Literal) else known[atom] for atom in atoms
    ]
    for equation in body.eqns:
        # Such as the bounds of a slice.
        parts = [
            x for x in equation.params.values() if type(x) is tuple and {*map(type, x)} == {int}
        ]
        yield [*told(equation.invars), *map(str, parts)]
        for inner in jaxprs_within(equation):
            yield from _operands(inner)
        known |= zip(equation.outvars, places, strict=False)
    yield told(body.outvars)


def _constant(value: Any) -> int | str:
    """Return the checksum of an array; -1 of a number, which an equation has in words."""
    is_array = isinstance(value, np.ndarray | jax.Array) and not _number(value)
    return checksum(value) if is_array else -1


def _maker(equation: Any) -> str:
    maker = _jax.source_of(equation).rpartition(", ")[0]
    return f" in {maker}" if maker else ""


def _number(value: Any) -> str:
    """Return a number in words; empty if it is none."""
    dtype = getattr(value, "dtype", None)
    if value is None or (dtype is None and type(value) not in (*_NUMBERS, bool)):
        return ""
    if np.shape(value) or (dtype is not None and jnp.issubdtype(dtype, jax.dtypes.extended)):
        return ""
    found = np.asarray(value).item()
    # As many digits as 32 bits have, so that 0.9 is written as such.
    return f"{found:.7g}" if isinstance(found, float) else str(found)


def _types(node: Any) -> Iterator[str]:
    """Yield the names of the types of a pytree's nodes, without Python's own containers."""
    found = jax.tree_util.default_registry.flatten_one_level(node)
    if found is None or node is None:
        return
    if type(node).__module__ != "builtins":
        yield type(node).__name__
    for child in found[0]:
        yield from _types(child)
