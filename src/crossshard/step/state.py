"""States: the layouts of a step's states, the first state, and moves from and to other steps."""

import contextlib
import dataclasses
import itertools
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Var, jaxpr_as_fun
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from crossshard import _check, _jax, _mesh
from crossshard._hash import checksum
from crossshard.distributed.agreement import check_agreement
from crossshard.distributed.watch import waiting
from crossshard.errors import ArgumentError, ArgumentTypeError, CheckpointWarning
from crossshard.model.layout import StateLayout, strong_copy
from crossshard.model.merged import check_alike, differing, merged
from crossshard.model.model_state import check_initial
from crossshard.model.models import check_params, combine, partition
from crossshard.model.state import TrainState
from crossshard.pipeline.update.optimize import MastersState, MovingAverageState
from crossshard.pipeline.update.plan import Planner
from crossshard.shards.cut import (
    PER_SHARD,
    REPLICATED,
    Placement,
    check_fits,
    one_for_all,
    other_axes_of,
    spec_over,
)
from crossshard.shards.devices import (
    are_of_all_processes,
    put_whole,
    put_whole_unless_on,
    shards_on,
    types_on,
)
from crossshard.step.function import StepConfig

# XLA takes four times as long for a program with twice as many outputs.
_MOST_OUTPUTS = 1024


class Initial(NamedTuple):
    """The function that makes an initial state, and its inputs."""

    layout: StateLayout  # its layout
    types: TrainState  # its types and shardings
    make: Any  # the compiled function of arrays and key
    arrays: Any  # the parameters, the frozen arrays and the model state
    key: Any  # the key
    given: Any  # the types of arrays and key, on the mesh


class States:
    """Makes and moves the states of a step, and knows the layout of each kind that it has met.

    Methods that move a state are called with the step's mesh set. For errors see ``TrainStep``.
    """

    def __init__(self, config: StepConfig):
        self._config = config
        self._known: dict[Any, StateLayout] = {}
        self._moves: dict[Any, _Move] = {}

    # Layouts.

    @property
    def number_of_kinds(self) -> int:
        """How many kinds of states the step has met."""
        return len(self._known)

    def layout(self, state: TrainState) -> StateLayout:
        """Return the layout of a state, or of its types."""
        params = state.params
        if self._config.is_grouped:
            params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), params)
        return self._of_params(params, state.other_axes, state)

    def _check_wrt(self, state: TrainState, params: Any) -> None:
        """Raise ArgumentError if a state is of a step that trains other parameters."""
        frozen, wrt = state.frozen, self._config.wrt
        if wrt is None and not any(map(_check.is_inexact, jax.tree.leaves(frozen))):
            return
        own = None if self._config.loss.model_state is not None else state.model_state
        _, trained, *_ = partition(combine(state.skeleton, params, frozen, own), wrt)
        paths = [dict(jax.tree_util.tree_leaves_with_path(each)) for each in (trained, params)]
        for path in sorted(paths[0].keys() ^ paths[1].keys(), key=jax.tree_util.keystr):
            name = f"params{jax.tree_util.keystr(path).removesuffix('.value')}"
            how = ("trained", "frozen") if path in paths[1] else ("frozen", "trained")
            raise ArgumentError(
                f"The state is of a step with another wrt=: {name} is {how[0]} in it, and "
                f"{how[1]} here. Make another state of its model, step.init(other.model(state))."
            )

    def _of_params(
        self, params: Any, other_axes: tuple[PartitionSpec, ...], state: TrainState | None = None
    ) -> StateLayout:
        """Return the layout of states with these parameters and these specs on the other axes.

        If they are of a state, it may be another step's.
        """
        leaves, tree = jax.tree.flatten(params)
        shapes = tuple((jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves)
        key = tree, shapes, other_axes
        if key in self._known:
            return self._known[key]
        if state is not None:
            self._check_wrt(state, params)
        config = self._config
        mesh, pipeline = config.mesh, config.pipeline
        shards = shards_on(mesh, config.axes, pipeline.groups if config.is_grouped else None)
        # JAX drops axes of size 1 from the shardings of its results.
        several = [axis for axis, size in mesh.shape.items() if size > 1]
        split = tuple(spec_over(each, several) for each in other_axes)
        # These traces run under another mesh than the user may have set.
        with _mesh.without_mesh():
            check_fits(params, other_axes, mesh)
            planner = Planner(
                pipeline.optimizer,
                params,
                shards,
                mesh,
                config.weight_update,
                config.params_sharded,
                # A stage on each shard's own gradient may read them all.
                leave_unread=not pipeline.of_own_gradient,
                other_axes=split[: len(leaves)],
                virtual_shards=config.loss.virtual_shards,
            )
            self._known[key] = StateLayout(
                mesh,
                shards,
                *planner.plan(),
                pipeline,
                tree.unflatten([jax.ShapeDtypeStruct(*each) for each in shapes]),
                config.loss.model_state,
                split,
                has_one_state=config.loss.over_batch,
            )
        return self._known[key]

    # The first state.

    def prepare(self, params: Any, rng: Any, model_state: Any) -> Initial:
        """Return what ``init`` needs to make the state of a model; nothing is computed yet."""
        config, (impl, key) = self._config, check_key(rng)
        mesh, kind = config.mesh, config.loss.model_state
        has_one = config.loss.over_batch
        model_state = check_initial(kind, params, model_state, has_one_state=has_one)
        skeleton, *arrays = partition(params, config.wrt)
        if kind is not None:
            arrays[2] = model_state
        # Model state may be placed in any way on a mesh whose axes are all shard axes.
        of = arrays if len(config.axes) < len(mesh.axis_names) else arrays[:2]
        other_axes = other_axes_of(of, mesh, config.axes, params_sharded=config.params_sharded)
        layout = self._of_params(arrays[0], other_axes)
        check_params(params, arrays[0], config.pipeline.optimizer, config.wrt)

        def make(arrays: Any, key: Any) -> TrainState:
            state = layout.initial(skeleton, impl, arrays, key)
            return dataclasses.replace(state, other_axes=other_axes)

        # Traced with the types that the arrays will have, so that JAX need not trace it again.
        given = types_on(mesh, (arrays, key), layout.specs_of_arrays(arrays[1]))
        with _mesh.in_place_of_the_users_mesh(mesh):
            types = jax.eval_shape(make, *given)
        config.loss.check_state(types)
        shardings = layout.shardings(types)
        types = jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            types,
            shardings,
        )
        return Initial(layout, types, jax.jit(make, out_shardings=shardings), arrays, key, given)

    def first(self, initial: Initial) -> TrainState:
        """Make the initial state."""
        parts = {
            "parameters": initial.arrays[0],
            "the model's other state": initial.arrays[1:],
            "rng": initial.key,
            "optimizer": initial.types.opt_state,
        }
        for name, tree in zip(("params", "params", "model_state"), initial.arrays, strict=True):
            _check.arrays(name, tree)
        # The optimizer's own init may put in numbers of this process, such as a learning rate.
        with _mesh.in_place_of_the_users_mesh(self._config.mesh):
            lower = lambda: initial.make.lower(*initial.given)
            self._check_equal_everywhere("init", parts, lower)
        both = (initial.arrays, initial.key)
        arrays, key = jax.tree.map(lambda x, to: put_whole(x, to.sharding), both, initial.given)
        with _mesh.in_place_of_the_users_mesh(self._config.mesh):
            if len(jax.tree.leaves(initial.types)) <= 2 * _MOST_OUTPUTS:
                return initial.make(arrays, key)
            return _in_pieces(initial, jax.tree.leaves((arrays, key)))

    def _check_equal_everywhere(self, call: str, parts: dict[str, Any], lower: Any = None) -> None:
        """Raise unless all processes have the same arrays, and would run the same program."""
        check_agreement(
            call,
            lambda: {name: checksum(tree) for name, tree in parts.items()},
            self._config.mesh,
            "Replicated arrays must be equal in every process: create them from the same seed, or "
            "load the same checkpoint.",
            lower,
        )

    # From this step and to it.

    def unshard(self, state: TrainState) -> TrainState:
        """Return the state with full arrays, in the optimizer's own shapes."""
        layout = self.layout(state)
        return self._run(layout.unpack, state, layout.shardings_of_unsharded(state))

    def collected(self, state: TrainState) -> TrainState:
        """Return the state without the rows of ``Owners``; arrays stay sharded."""
        layout = self.layout(state)
        if layout.without_owners is layout:
            return state
        types = jax.eval_shape(layout.collected, state)
        return self._run(layout.collected, state, layout.without_owners.shardings(types))

    def reshard(self, state: TrainState) -> TrainState:
        """Move a state of any number of shards to this step's layout."""
        config = self._config
        others = [axis for axis in config.mesh.axis_names if axis not in config.axes]
        kept = tuple(spec_over(each, others) for each in state.other_axes)
        state = dataclasses.replace(state, other_axes=kept if any(kept) else ())
        layout = self.layout(state)
        state, changes = with_options_of(layout, state)
        if changes:
            text = f"The state is of a step with other options: {'; '.join(changes)}."
            # The user's line, which calls TrainStep.reshard, is three frames up.
            warnings.warn(text, CheckpointWarning, stacklevel=3)
        layout.check_optimizer(state)
        given = jax.tree.map(lambda x: None if x is NEW else x, state)
        self._check_equal_everywhere("reshard", {"a state": given})
        types = completed(layout, state)
        layout.check_unsharded(types)
        where = layout.shardings_of_incoming(types)
        place = lambda x, to: x if x is NEW else put_whole_unless_on(x, to)
        state = jax.tree.map(place, state, where)
        state = completed(layout, state, jax.tree.leaves(where))
        fits = layout.is_of_these_shards(state)
        apart = _groups_apart(layout, state) if fits else []
        if not fits or apart:
            if config.is_grouped and not config.pipeline.joins_groups:
                what = (
                    f"Shards {apart[0]} are one group here, and have different arrays in the state"
                    if apart
                    else "The state has groups over another number of shards than "
                    f"{layout.number_of_shards}"
                )
                raise ArgumentError(
                    f"{what}. Choose one shard's parameters with other.model(state, shard=0) and "
                    f"init with them."
                )
            name = differing(state) if state.per_shard else ""
            if name:
                text = (
                    f"{name} differs between the shards of the state, and on those of this step it "
                    f"begins with the first one's. A loss may make it the same on all shards, such "
                    f"as by jax.lax.psum of what each adds."
                )
                warnings.warn(text, CheckpointWarning, stacklevel=3)
            types = jax.eval_shape(layout.on_other_shards, state)
            return self._run(layout.on_other_shards, state, layout.shardings(types))
        return self._run(layout.pack, state, layout.shardings(state))

    def with_params(self, state: TrainState, params: Any, frozen: Any) -> TrainState:
        """Return a state with other parameters, unsharded ones, of which groups may share one set.

        Stages make anew what follows the parameters. All else is as it was.
        """
        layout = self.layout(state)
        follows = layout.pipeline.follows_params(state.opt_state)
        chosen = lambda tree: jax.tree.map(lambda x, each: x if each else None, tree, follows)

        def make(params: Any, frozen: Any) -> Any:
            spread = lambda x, own: jnp.broadcast_to(x, own.shape)
            params = jax.tree.map(spread, params, state.params)
            opt_state, none = _first(layout, params), jnp.int32(0)
            given = dataclasses.replace(state, params=params, frozen=frozen, opt_state=opt_state)
            made = layout.pack(dataclasses.replace(given, step=none, rng=none, model_state=()))
            found = made.params, made.frozen, chosen(made.opt_state)
            return jax.tree.map(strong_copy, found)

        to = layout.shardings(state)
        run = jax.jit(make, out_shardings=(to.params, to.frozen, chosen(to.opt_state)))
        params, frozen, new = run(params, frozen)
        pick = lambda new, old: old if new is None else new
        opt_state = jax.tree.map(pick, new, state.opt_state, is_leaf=lambda x: x is None)
        return dataclasses.replace(state, params=params, frozen=frozen, opt_state=opt_state)

    def _run(self, how: Callable[[Any], Any], state: TrainState, to: TrainState) -> TrainState:
        """Return what ``how`` makes of a state, which stays valid, with these shardings."""
        leaves, tree = jax.tree.flatten(state)
        shardings = jax.tree.leaves(to)
        kinds = tuple((jnp.shape(x), jnp.result_type(x), _sharding_of(x)) for x in leaves)
        # Or a loop that saves would compile it each time. Layouts live as long as this.
        key = how, tree, kinds
        if key not in self._moves:
            self._moves[key] = _Move(how, state, shardings)
        # All processes of the job then exchange their parts.
        together = (
            are_of_all_processes(self._config.mesh)
            and _jax.at_top_level()
            and not all(getattr(x, "is_fully_replicated", True) for x in leaves)
        )
        with waiting("unshard") if together else contextlib.nullcontext():
            return self._moves[key](leaves)

    # Models.

    def model(self, state: TrainState, arrays: tuple[Any, Any, Any]) -> Any:
        """Return the model of these arrays, copied, since the next step donates the state."""
        # Copied before they are a model: a tree.map over an NNX module separates tied variables.
        outer = self._config.outer_mesh
        arrays = jax.tree.map(lambda x: _mesh.on_mesh(jnp.copy(x), outer), arrays)
        model = combine(state.skeleton, *arrays)
        return model if self._config.loss.model_state is None else (model, arrays[2])

    def arrays(self, state: TrainState, shard: int | None, ema: bool) -> tuple[Any, Any, Any]:
        """Return the parameters, the frozen arrays and the model state of a shard, or of all.

        Those of all are the parameters that the shards have in common, as after the last
        synchronisation, and the mean of statistics. With ``ema`` the parameters are their moving
        average.
        """
        config = self._config
        _check.flag("ema", ema)
        if shard is not None:
            shard = _check.index("shard", shard, config.number_of_shards, "shards")
        joins = config.pipeline.joins_groups and shard is None
        if config.is_grouped and shard is None and not joins:
            raise ArgumentError(
                f"With group_assignment {config.pipeline.groups} the parameters differ between "
                f"shards. Choose one, such as shard=0."
            )
        # Indexing moves the index from the host to the devices.
        with jax.transfer_guard("allow"):
            params = self._average(state) if ema else state.params
            if joins:
                params = config.pipeline.exported(state.opt_state, state.params)
            elif config.is_grouped:
                params = jax.tree.map(lambda x: x[shard], params)
            model_state = state.model_state
            if state.per_shard:
                if shard is None:
                    check_alike(state)
                    model_state = merged(state)
                else:
                    model_state = jax.tree.map(lambda x: x[shard], model_state)
            return params, state.frozen, model_state

    def _average(self, state: TrainState) -> Any:
        """Return the moving average of the parameters, in their shapes and dtypes."""
        optimize = self._config.pipeline.optimize
        if optimize.ema is None:
            raise ArgumentError(
                "This step keeps no moving average of the parameters. Write "
                "make_train_step(..., ema=0.999)."
            )
        # Sharded parameters have their own shapes, and are not gathered.
        whole = self.collected(state) if self._config.params_sharded else self.unshard(state)
        # Not optax.tree.get: another state, such as that of optax.ema, may have the name, too.
        kept = whole.opt_state.inner_state
        kept = kept if optimize.master_dtype is None else kept.inner_state
        return jax.tree.map(lambda p, x: x.astype(p.dtype), state.params, kept.ema)


def _groups_apart(layout: StateLayout, state: TrainState) -> list[list[int]]:
    """Return the groups, or workers, whose shards are not alike in a state of as many shards."""
    traced = not (layout.pipeline.joins_groups or _jax.at_top_level())  # without numbers
    if layout.groups is None or traced:
        return []
    members = layout.groups.members

    def look(arrays: Any) -> jax.Array:
        def differ(x: jax.Array) -> jax.Array:
            x, first = x[members], x[members[:, :1]]
            # A NaN is like another.
            return ((x != first) & ((x == x) | (first == first))).any(range(1, x.ndim))

        return jnp.stack([differ(x) for x in jax.tree.leaves(arrays)]).any(0)

    # Right after a synchronisation all have the same parameters.
    run = jax.jit(look, out_shardings=NamedSharding(layout.mesh, PartitionSpec()))
    apart = run((state.params, state.opt_state.inner_state))
    return members[np.asarray(apart)].tolist()


class _Move:
    """A function of a state, compiled for the arrays that it changes; the others are copied.

    To compile a copy of thousands of arrays takes longer than to read them from a disk.
    """

    def __init__(self, how: Callable[[Any], Any], state: TrainState, shardings: Sequence[Sharding]):
        leaves = jax.tree.leaves(state)
        jaxpr, types = jax.make_jaxpr(how, return_shape=True)(state)
        self._tree = jax.tree.structure(types)
        place_of = {var: place for place, var in enumerate(jaxpr.jaxpr.invars)}
        found = [place_of.get(var) if isinstance(var, Var) else None for var in jaxpr.jaxpr.outvars]
        # For each output the input that it is, with the same sharding.
        self._same = [
            place if place is not None and _lies_so(leaves[place], sharding) else None
            for place, sharding in zip(found, shardings, strict=True)
        ]
        changed = [place is None for place in self._same]
        pruned, self._taken = _jax.pruned(jaxpr, changed)
        run = lambda *args: jaxpr_as_fun(pruned)(*map(jnp.copy, args))
        to = list(itertools.compress(shardings, changed))
        self._changed = jax.jit(run, out_shardings=to)

    def __call__(self, leaves: Sequence[Any]) -> TrainState:
        made = iter(self._changed(*itertools.compress(leaves, self._taken)))
        found = [next(made) if place is None else jnp.copy(leaves[place]) for place in self._same]
        state: TrainState = self._tree.unflatten(found)
        return state


def _sharding_of(x: Any) -> Any:
    """Return the sharding of an array; ``None`` of one that is traced or on the host."""
    is_traced = isinstance(x, jax.core.Tracer)
    return x.sharding if isinstance(x, jax.Array) and not is_traced else None


def _lies_so(x: Any, sharding: Sharding) -> bool:
    own = _sharding_of(x)
    return own is not None and own.is_equivalent_to(sharding, x.ndim)


def check_key(rng: Any) -> tuple[Any, jax.Array]:
    """Return the implementation and the data of a key, from a key or a seed."""
    dtype = getattr(rng, "dtype", None)
    if isinstance(rng, int | np.integer) and not isinstance(rng, bool):
        if not -(1 << 63) <= rng < 1 << 63:
            raise ArgumentError(f"rng must be a seed of at most 64 bits, with its sign; got {rng}.")
        rng = jax.random.key(rng)
    elif dtype == jnp.uint32 and rng.ndim == 1:  # as jax.random.PRNGKey makes them
        rng = jax.random.wrap_key_data(jnp.asarray(rng))
    elif dtype is None or not jnp.issubdtype(dtype, jax.dtypes.prng_key) or rng.shape != ():
        raise ArgumentTypeError(
            f"rng must be a seed or a key such as jax.random.key(0); got {_check.shown(rng)} "
            f"({type(rng).__name__})."
        )
    return jax.random.key_impl(rng), jax.random.key_data(rng)


def _in_pieces(initial: Initial, inputs: list[Any]) -> TrainState:
    """Make the state with several programs, each of some of its arrays."""
    jaxpr = initial.make.trace(*initial.given).jaxpr
    types, tree = jax.tree.flatten(initial.types)
    made: list[Any] = []
    for start in range(0, len(types), _MOST_OUTPUTS):
        own = types[start : start + _MOST_OUTPUTS]
        wanted = [start <= place < start + _MOST_OUTPUTS for place in range(len(types))]
        pruned, taken = _jax.pruned(jaxpr, wanted)
        run = jax.jit(jaxpr_as_fun(pruned), out_shardings=[x.sharding for x in own])
        made += run(*itertools.compress(inputs, taken))
    return tree.unflatten(made)


# A state of a step with other options: which arrays are of which option.

# Stands in the place of an array that a state lacks.
NEW = type("New", (), {})()
OPTIMIZER, MASTERS, AVERAGE, PREPROCESS = "optimizer", "master_dtype", "ema", "preprocess"
_INNER = ".opt_state.inner_state"

# An option, or "" for arrays of none; and an array's path in it, whatever the other options are.
Key = tuple[str, str]


def key_of(path: str, *, masters: bool, average: bool) -> Key:
    """Return the option of an array and its path in it, given its path in a state.

    ``masters`` and ``average`` tell whether the state has these two.
    """
    if not path.startswith(_INNER):
        found = re.match(r"\.opt_state\.(?:others\[')?(\w+)", path)
        return (found[1] if found else ""), path
    rest = path.removeprefix(_INNER)
    for option, field, has in ((MASTERS, ".masters", masters), (AVERAGE, ".ema", average)):
        if has and rest.startswith(field):
            return option, rest
        rest = rest.removeprefix(".inner_state") if has else rest
    return OPTIMIZER, rest


# What the state of an option is made from, if not by its ``init`` alone.
_MADE = {MASTERS: "from the parameters", AVERAGE: "from the parameters, or their masters"}


def describe_changes(new: Iterable[str], gone: Iterable[str], kept: Collection[str]) -> list[str]:
    """Describe what becomes of options whose arrays are made, are dropped, or stay."""
    new, gone, found = set(new), set(gone), []
    for option in sorted(new | gone):
        how = _MADE.get(option, "anew")
        if option in kept or option in new & gone:
            found.append(f"{option} keeps other arrays: new ones are made {how}, others dropped")
        elif option in new:
            found.append(f"{option} is new, and its state is made {how}")
        else:
            found.append(f"{option} is gone, and its state is dropped")
    return found


def with_options_of(layout: StateLayout, state: TrainState) -> tuple[TrainState, list[str]]:
    """Convert an unsharded state of a step with other options to those of a layout's step.

    Returns:
      The state, with ``NEW`` where an option is new; and what was done, in words.
    """
    own, structure = jax.tree.flatten(layout.types)
    if jax.tree.structure(state.opt_state) == structure:
        return state, []
    trees = state.opt_state, layout.types
    differ = lambda one, other: jax.tree.structure(one) != jax.tree.structure(other)
    if differ(*(_wrapped(tree.inner_state)[0] for tree in trees)):
        return state, []
    stages = [tree.preprocess for tree in trees]
    if all(map(jax.tree.leaves, stages)) and differ(*stages):
        raise ArgumentError(
            "The state is of a step with another preprocess, whose state this one's cannot take "
            "over. Pass the same preprocess, or init with other.model(state)."
        )
    keys, leaves = _keys(layout.types), jax.tree.leaves(state.opt_state)
    given = dict(zip(_keys(state.opt_state), leaves, strict=True))
    new = [key[0] for key in keys if key not in given]
    gone = [key[0] for key in given.keys() - set(keys)]
    as_own = lambda x, dtype: x if x is NEW or x.dtype == dtype else x.astype(dtype)
    found = [as_own(given.get(key, NEW), like.dtype) for key, like in zip(keys, own, strict=True)]
    kept = {key[0] for key in keys if key in given}
    changes = describe_changes(new, gone, kept)
    return dataclasses.replace(state, opt_state=structure.unflatten(found)), changes


def _wrapped(inner: Any) -> tuple[Any, dict[str, bool]]:
    """Return the state of the user's optimizer, and which wrappers are around it."""
    masters = isinstance(inner, MastersState)
    inner = inner.inner_state if masters else inner
    average = isinstance(inner, MovingAverageState)
    return inner.inner_state if average else inner, {"masters": masters, "average": average}


def _keys(opt_state: Any) -> list[Key]:
    around = _wrapped(opt_state.inner_state)[1]
    return [
        key_of(f".opt_state{jax.tree_util.keystr(path)}", **around)
        for path, _ in jax.tree_util.tree_leaves_with_path(opt_state)
    ]


def completed(
    layout: StateLayout, state: TrainState, shardings: Sequence[Sharding] | None = None
) -> TrainState:
    """Replace each ``NEW`` of an unsharded state by what its option's ``init`` makes.

    Per-shard arrays may be of another number of shards. Without ``shardings``, those of all arrays,
    the new ones are only types.
    """
    leaves, tree = jax.tree.flatten(state)
    places = [place for place, leaf in enumerate(leaves) if leaf is NEW]
    if not places:
        return state

    def make(params: Any, masters: Any) -> list[jax.Array]:
        made = _first(layout, params, masters)
        whole = jax.tree.leaves(dataclasses.replace(state, opt_state=made))
        return [strong_copy(whole[place]) for place in places]

    inner = state.opt_state.inner_state
    masters = inner.masters if isinstance(inner, MastersState) else None
    if any(x is NEW for x in jax.tree.leaves(masters)):
        masters = None
    if shardings is None:
        found = jax.eval_shape(make, state.params, masters)
    else:
        run = jax.jit(make, out_shardings=[shardings[place] for place in places])
        lower = lambda: run.lower(state.params, masters)
        check_agreement("init", dict, layout.mesh, "", lower)
        found = run(state.params, masters)
    for place, x in zip(places, found, strict=True):
        leaves[place] = x
    return tree.unflatten(leaves)


def _first(layout: StateLayout, params: Any, masters: Any = None) -> Any:
    """Return the unsharded optimizer state before the first step, around masters if they exist."""
    grouped, shards = layout.groups is not None, layout.number_of_shards

    def spread(placement: Placement, x: Any) -> jax.Array:
        if grouped:
            return x if placement.per_shard else one_for_all(x)
        return jnp.broadcast_to(x, (shards, *x.shape)) if placement.per_shard else x

    def init(params: Any, masters: Any) -> Any:
        made = layout.pipeline.init(params)
        if masters is None:
            return made
        of_masters = layout.pipeline.with_options(master_dtype=None).init(masters)
        return made._replace(inner_state=MastersState(masters, of_masters.inner_state))

    made = (jax.vmap(init) if grouped else init)(params, masters)
    own = PER_SHARD if grouped else REPLICATED
    inner = jax.tree.map(lambda _: own, made.inner_state)
    return jax.tree.map(spread, layout.pipeline.placements(made, inner), made)
