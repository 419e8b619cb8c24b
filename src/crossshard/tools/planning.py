"""plan: compiles a step in several ways for a machine that is not there, and reads the programs.

Machines are topologies with a name: TPU slices, GPU clusters, and CPU devices of this machine.
"""

import collections
import concurrent.futures
import dataclasses
import importlib.util
import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh

from crossshard import TrainStep, _check, make_train_step
from crossshard._annotations import Loss, PyTree
from crossshard._text import count, size, table
from crossshard.errors import ArgumentError
from crossshard.shards.devices import cpu_devices
from crossshard.step.rebuild import axes_of_batch, bytes_on_device, number_of_parameters
from crossshard.tools.inspection.collectives import Collective
from crossshard.tools.inspection.inspect import inspect
from crossshard.tools.quiet import quiet

# Topologies, and their descriptions for compilers.

_GIB = 2**30

# The bytes that libtpu's compiler lets a program use on a chip, and the dimensions of the torus.
TPUS = {
    "v5e": (int(15.75 * _GIB), 2),
    "v5p": (int(95.74 * _GIB), 3),
    "v6e": (int(31.25 * _GIB), 2),
}
# The compilers for TPUs and for GPUs: the modules of which one must be installed, their name in
# errors, the extra that installs them, and the environment variables that they read when loaded.
_LIBTPU_SETTINGS = {
    # There is no TPU here, nor a server that could tell which one.
    "TPU_SKIP_MDS_QUERY": "1",
    # Nothing is run, so two processes may compile at once.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_LOG_DIR": "disabled",
}
_FOR_TPUS = (("libtpu",), "libtpu, which compiles for TPUs", "tpu", _LIBTPU_SETTINGS)
_FOR_GPUS = (
    ("jax_cuda12_plugin", "jax_cuda13_plugin"),
    *("JAX for CUDA, which compiles for GPUs", "cuda12"),
    # There is no GPU here to be compatible with.
    {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"},
)

_H100_BYTES = 84942979072
# An H100 for the compiler: a ``GpuTargetConfigProto`` of XLA, as text. From h100_sxm.txtpb in
# xla/backends/gpu/target_config/specs of github.com/openxla/xla (Apache-2.0).
_H100 = f"""
gpu_device_info {{
  name: "NVIDIA H100 80GB HBM3"
  device_vendor: "NVIDIA Corporation"
  cuda_compute_capability {{ major: 9 }}
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  l2_cache_size: 52428800
  memory_bandwidth: 3352320000000
  device_memory_size: {_H100_BYTES}
  device_address_bits: 64
  driver_version: "13.0.0"
  runtime_version: "12.8.0"
  compile_time_toolkit_version: "12.8.0"
  dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "NVIDIA H100 80GB HBM3"
"""
# The names of topologies, in words.
KNOWN = (
    "v5e:4x4 and v6e:8x8 (chips), v5p:4x4x4, h100:4x8 (hosts x GPUs), cpu:8; in these forms with "
    "other numbers"
)
_MOST_DEVICES = 2**17


@dataclasses.dataclass(frozen=True)
class Topology:
    """The devices to compile for.

    Attributes:
      name: the name as it was given.
      memory: the bytes of a device that a program may use; CPU devices share those of this machine.
      devices: the devices, in the order of the machine.
    """

    name: str
    memory: int
    devices: Sequence[jax.Device]

    @property
    def size(self) -> int:
        """The number of devices."""
        return len(self.devices)

    @property
    def kind(self) -> str:
        """The kind of device: ``"v5e"``, ``"h100"``, ``"cpu"`` …"""
        return self.name.partition(":")[0]

    def mesh(self, shape: dict[str, int]) -> Mesh:
        """Return a mesh with these axes, on which devices next to each other are neighbours."""
        sizes, names = tuple(shape.values()), tuple(shape)
        types = (AxisType.Auto,) * len(names)
        if self.kind not in TPUS:
            # The GPUs of a host follow each other, and all links within a host are alike.
            return Mesh(np.array(self.devices).reshape(sizes), names, axis_types=types)
        from jax.experimental import mesh_utils

        placed = mesh_utils.create_device_mesh(sizes, self.devices, allow_split_physical_axes=True)
        return Mesh(placed, names, axis_types=types)


def topology(name: str) -> Topology:
    """Return the topology of a name such as ``v5p:4x4x4``, ``h100:4x8`` or ``cpu:8``.

    Raises:
      ArgumentError: there is none of this name, or its compiler is not installed.

    >>> topology("cpu:1").size
    1
    """
    given = name if isinstance(name, str) else ""
    found = re.fullmatch(r"([a-z]\w*):(\d{1,6}(?:x\d{1,6})*)", given)
    kind, sizes = (found[1], [int(n) for n in found[2].split("x")]) if found else ("", [0])
    is_tpu = kind in TPUS
    if kind not in (*TPUS, "h100", "cpu") or not 0 < math.prod(sizes) <= _MOST_DEVICES:
        raise ArgumentError(f"There is no topology {_check.shown(name)}. Known are {KNOWN}.")
    numbers = TPUS[kind][1] if is_tpu else 2 if kind == "h100" else 1
    if len(sizes) != numbers:
        example = {1: "8", 2: "4x8"}[numbers] if not is_tpu else "x".join(["4"] * numbers)
        raise ArgumentError(
            f"{kind} takes {count(numbers, 'number')}, as in {kind}:{example}; got {name!r}. Known "
            f"are {KNOWN}."
        )
    if kind == "cpu":
        cpu_devices(sizes[0])
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return Topology(name, memory // sizes[0], jax.devices("cpu")[: sizes[0]])
    compilers, what, extra, settings = _FOR_TPUS if is_tpu else _FOR_GPUS
    if all(importlib.util.find_spec(each) is None for each in compilers):
        raise ArgumentError(f'{name} needs {what}: pip install "crossshard[{extra}]".')
    described: dict[str, Any] = {"platform": "tpu", "topology_name": name}
    if is_tpu and math.prod(sizes) == 1:
        # The default is four or eight chips per host.
        described["chips_per_host_bounds"] = (1, 1, 1)
    elif not is_tpu:
        described = {"platform": "cuda", "topology_name": kind, "target_config": _H100}
        described["topology"] = f"1x{given.partition(':')[2]}"
    for setting, value in settings.items():
        os.environ.setdefault(setting, value)
    # Imported here, since `import crossshard` loads no module that JAX, Optax and Flax do not load.
    from jax.experimental import topologies

    try:
        with quiet():
            devices = topologies.get_topology_desc(**described).devices
    except Exception as error:
        first = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise ArgumentError(
            f"There is no topology {name!r}: {first:.200}. Known are {KNOWN}."
        ) from error
    return Topology(name, TPUS[kind][0] if is_tpu else _H100_BYTES, devices)


# For ``plan``, which has an argument of this name.
_topology_of = topology


# What a step needs on a topology.

_REPLICATED = "replicated"
# Options that the plan chooses itself.
_OURS = {"mesh", "num_shards", "axis_name", "weight_update"}
# Options that only a step with sharded parameters takes.
_FOR_SHARDED = {"gather_dtype"}
# An error of XLA for TPUs: "… Used 20.51G of 15.75G hbm. …"
_USED = re.compile(r"Used ([\d.]+)([KMGT]) of [\d.]+[KMGT] hbm")
# Or: "… memory required for HLO temporaries (30.32G) exceeds available HBM …", without arguments.
_TEMPORARIES = re.compile(r"HLO temporaries \(([\d.]+)([KMGT])\) exceeds")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
# How many programs are compiled at once. One compilation hardly uses two cores.
_AT_ONCE = 2
_MEMORY_HEAD = (
    *("memory per device", "fits", "parameters", "optimizer state", "other"),
    *("temporaries", "needed", "available"),
)
_LINKS_HEAD = ("sent per device and step", "collectives", "across hosts", "all", "hidden")


@dataclasses.dataclass(frozen=True)
class MemoryUse:
    """Bytes on each device.

    Attributes:
      parameters: the parameters, including those that are not trained.
      optimizer_state: the optimizer's state.
      other: the batch, the rest of the state, and the padding of all arguments.
      temporaries: what else the program needs while it runs: activations and gradients; ``None`` if
        the compiler refused the program before it counted them.
      needed: the peak of all of these, by the compiler; a lower bound if the step was not compiled.
      available: the memory of a device.
    """

    parameters: int
    optimizer_state: int
    other: int
    temporaries: int | None
    needed: int
    available: int

    @property
    def left(self) -> int:
        """The bytes that are left; negative if it does not fit."""
        return self.available - self.needed


@dataclasses.dataclass(frozen=True)
class LinkUse:
    """What a step sends, on each device.

    Attributes:
      collectives: how many collectives of each kind run.
      sent: the bytes over all links.
      across: of these, the bytes between hosts of GPUs. All links of a TPU slice are alike.
      hidden: the bytes that are sent while matrix products or other kernels are scheduled.
    """

    collectives: Mapping[str, int]
    sent: float
    across: float
    hidden: float


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A way to keep parameters and optimizer state, compiled.

    Attributes:
      weight_update: ``"replicated"`` or ``"sharded"``.
      params: ``"replicated"`` or ``"sharded"``.
      memory: the memory use of each device.
      links: what a device sends; ``None`` if it was not compiled, or the compiler refused it.
      compiled: whether it was compiled; it is not if its state alone is too large.
    """

    weight_update: str
    params: str
    memory: MemoryUse
    links: LinkUse | None
    compiled: bool

    @property
    def fits(self) -> bool:
        """Whether it fits into the memory of a device."""
        return self.memory.left >= 0

    @property
    def name(self) -> str:
        """Its name in tables: ``replicated``, ``sharded`` or ``params sharded``."""
        return _name_of_way(self.weight_update, self.params)


def _name_of_way(weight_update: str, params: str) -> str:
    return weight_update if params == _REPLICATED else "params sharded"


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a step needs on a machine, for each way to keep its parameters and its state.

    Attributes:
      topology: the name of the topology.
      devices: the number of devices.
      parameters: the number of parameters.
      candidates: the ways to keep them, whether compiled or too large to be.

    >>> import jax, jax.numpy as jnp, optax
    >>> import crossshard
    >>> w, x = jax.ShapeDtypeStruct((8, 8), "float32"), jax.ShapeDtypeStruct((4, 8), "float32")
    >>> loss_fn = lambda w, x: jnp.mean((x @ w) ** 2)
    >>> found = crossshard.plan(loss_fn, w, x, optax.sgd(0.1), topology="cpu:1")
    >>> found.candidates[0].memory.parameters
    256
    """

    topology: str
    devices: int
    parameters: int
    candidates: Sequence[Candidate]

    def to_json(self, indent: int | None = None) -> str:
        """Return the plan as JSON.

        The keys are the attributes of this class and of its fields, and ``fits`` and ``left``.
        """
        fields = dataclasses.asdict(self)
        for each, candidate in zip(fields["candidates"], self.candidates, strict=True):
            each["fits"] = candidate.fits
            each["memory"]["left"] = candidate.memory.left
        return json.dumps(fields, indent=indent)

    def __str__(self) -> str:
        return self.table()

    def table(self) -> str:
        """Return plain text tables of memory and of what is sent, with a row for each candidate."""
        parts = [
            f"{self.parameters:,} parameters on {self.topology}, {count(self.devices, 'device')}",
            table(_MEMORY_HEAD, [_memory_row(each) for each in self.candidates]),
            table(_LINKS_HEAD, [_link_row(each) for each in self.candidates]),
        ]
        if names := "; ".join(each.name for each in self.candidates if not each.compiled):
            parts.append(
                f"Not compiled, since what a device keeps between steps is more than its memory: "
                f"{names}."
            )
        return "\n\n".join(parts)


def _memory_row(each: Candidate) -> tuple[str, ...]:
    use = each.memory
    at_least = "" if each.compiled else "at least "
    fits = (
        f"yes, {size(use.left)} left" if each.fits else f"no, {at_least}{size(-use.left)} too much"
    )
    temporaries = "?" if use.temporaries is None else size(use.temporaries)
    parts = map(size, (use.parameters, use.optimizer_state, use.other))
    whole = map(size, (use.needed, use.available))
    return (each.name, fits, *parts, temporaries, *whole)


def _link_row(each: Candidate) -> tuple[str, ...]:
    if each.links is None:
        return (each.name, *["?"] * 4)
    kinds = ", ".join(f"{number} {kind}" for kind, number in each.links.collectives.items())
    share = each.links.hidden / each.links.sent if each.links.sent else 0
    shown = [size(number) if number else "–" for number in (each.links.across, each.links.sent)]
    return (each.name, kinds or "none", *shown, f"{share:.0%}")


def plan(
    loss_fn: Callable[..., Loss],
    params: PyTree,
    batch: PyTree,
    optimizer: optax.GradientTransformation,
    *,
    topology: str,
    **options: PyTree,
) -> Plan:
    """Compile a training step for a pod or a cluster, in several ways, and say what each needs.

    No step is run and no array is allocated, so a model may have 70 billion parameters: only its
    shapes are needed. The step is compiled with a replicated update, a sharded update, and sharded
    parameters (``params="sharded"``), with each device as a shard; a way whose state alone does not
    fit on a device is not compiled.

    Args:
      loss_fn: as ``make_train_step`` takes it.
      params: the model, as arrays or types, or a function without arguments that makes it, and is
        only traced.
      batch: the global batch, as arrays or types, or a function of the number of devices that
        returns it.
      optimizer: an Optax transformation.
      topology: ``"v5e:4x4"``, ``"v5p:16x16x16"``, ``"v6e:8x8"``: chips of a TPU slice;
        ``"h100:4x8"``: hosts times GPUs of a host; ``"cpu:8"``: CPU devices of this machine.
      **options: further arguments of ``make_train_step``.

    Returns:
      A Plan: print it, read its attributes, or call ``to_json()``.

    Raises:
      ArgumentError: an unknown topology, a missing compiler, a step that cannot be compiled.

    >>> import jax, jax.numpy as jnp, optax
    >>> w, x = jax.ShapeDtypeStruct((8, 8), "float32"), jax.ShapeDtypeStruct((4, 8), "float32")
    >>> loss_fn = lambda w, x: jnp.mean((x @ w) ** 2)
    >>> plan(loss_fn, w, x, optax.adam(0.1), topology="cpu:1").candidates[0].fits
    True
    """
    if chosen := sorted(_OURS & set(options)):
        raise ArgumentError(
            f"plan chooses the mesh and compares updates itself; leave out {chosen[0]}."
        )
    if isinstance(params, str):
        raise ArgumentError(
            f"plan compares replicated and sharded parameters itself; params is the model "
            f"here, and not {params!r}."
        )
    is_model = isinstance(params, nnx.Pytree) or not callable(params)
    model = params if is_model else nnx.eval_shape(params)
    where = _topology_of(topology)
    mesh, rows = where.mesh({"data": where.size}), batch(where.size) if callable(batch) else batch
    _check.arrays("batch", rows, or_types=True)
    found = []
    for weight_update, placement in _ways(optimizer, where.size):
        left_out = _FOR_SHARDED if placement == _REPLICATED else ()
        step = make_train_step(
            loss_fn,
            optimizer,
            mesh=mesh,
            weight_update=weight_update,
            params=placement,
            **{name: each for name, each in options.items() if name not in left_out},
        )
        found.append(_lower((weight_update, placement), where, step, model, rows))
    with quiet(), concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as pool:
        candidates = list(pool.map(lambda each: each(), found))
    parameters = number_of_parameters(model, options.get("wrt"))
    return Plan(topology, where.size, parameters, candidates)


def _ways(optimizer: Any, devices: int) -> list[tuple[str, str]]:
    """Return the ``weight_update`` and ``params`` of the steps that are compared."""
    ways = [("replicated", _REPLICATED), ("sharded", _REPLICATED), ("sharded", "sharded")]
    # Groups of shards have different parameters, which cannot be sharded over all.
    grouped = len(getattr(optimizer, "group_assignment", None) or ()) > 1
    # One shard has nothing to split.
    return ways[:1] if devices == 1 else ways[: 2 if grouped else 3]


def _lower(
    way: tuple[str, str], topology: Topology, step: TrainStep, model: Any, batch: Any
) -> Callable[[], Candidate]:
    """Lower a step; return a function that compiles it, and reads what it needs and sends.

    A step whose state does not fit on a device is neither lowered nor compiled, which would take
    minutes.
    """
    shards = topology.size
    state = step.abstract_init(model)
    # A replicated leaf of the batch may be a Python number.
    rows = sum(
        math.prod(np.shape(x)) * jnp.result_type(x).itemsize // (1 if axis is None else shards)
        for x, axis in zip(jax.tree.leaves(batch), axes_of_batch(step).of(batch), strict=True)
    )
    given = bytes_on_device(state) + rows
    lowered = step.lower(state, batch) if given <= topology.memory else None

    def candidate() -> Candidate:
        compiled, links, needed = None, None, given
        if lowered is not None:
            try:
                compiled = lowered.compile()
                links = _links(compiled, list(step.mesh.devices.flat))
            except jax.errors.JaxRuntimeError as error:
                refused_for = None if compiled else _bytes_when_refused(str(error), given)
                if refused_for is None:
                    what = f"{'read' if compiled else 'compiled'} for {topology.name}"
                    first = (str(error).splitlines() or ["no reason"])[0]
                    raise ArgumentError(
                        f"The step of {_name_of_way(*way)} cannot be {what}: {first:.300}"
                    ) from error
                needed = refused_for
        parameters = bytes_on_device((state.params, state.frozen))
        optimizer = bytes_on_device(state.opt_state)
        arguments, temporaries = given, None
        stats = None if compiled is None else compiled.memory_analysis()
        if stats is not None:
            arguments = stats.argument_size_in_bytes
            temporaries = stats.temp_size_in_bytes
            results = stats.output_size_in_bytes - stats.alias_size_in_bytes
            needed = arguments + temporaries + results
        memory = MemoryUse(
            parameters=parameters,
            optimizer_state=optimizer,
            other=max(0, arguments - parameters - optimizer),
            temporaries=temporaries,
            needed=needed,
            available=topology.memory,
        )
        return Candidate(*way, memory, links, lowered is not None)

    return candidate


def _bytes_when_refused(message: str, arguments: int) -> int | None:
    """Return the bytes that a program needs, if its compiler refused it for its size."""
    for pattern, more in ((_USED, 0), (_TEMPORARIES, arguments)):
        if found := pattern.search(message):
            return more + int(float(found[1]) * _UNITS[found[2]])
    return None


def _links(compiled: jax.stages.Compiled, devices: Sequence[Any]) -> LinkUse:
    report, kinds = inspect(compiled), collections.Counter[str]()
    sending = [each for each in report.counted if each.bytes_sent]
    for each in sending:
        kinds[each.kind] += each.times or 1
    across = sum(bytes_across(each, devices) for each in sending)
    hidden = report.bytes_sent - report.bytes_exposed
    return LinkUse(dict(sorted(kinds.items())), report.bytes_sent, across, hidden)


def bytes_across(each: Collective, devices: Sequence[Any]) -> float:
    """Return the bytes that a device sends to other hosts or slices, averaged over the devices.

    The devices of a group form a ring, host after host, so one device of each host sends to another
    host. In an all-to-all, all devices send to all others. Hosts of one TPU slice count as one.

    Args:
      each: the collective.
      devices: the devices of the program, in its order.
    """
    place_of = lambda x: getattr(x, "slice_index", 0) if x.platform == "tpu" else x.process_index
    across = pairs = 0
    for group in each.groups:
        sizes = collections.Counter(place_of(devices[at]) for at in group)
        if "to-all" in each.kind:
            pairs += len(group) ** 2 - len(group)
            across += len(group) ** 2 - sum(number**2 for number in sizes.values())
        else:
            # A permute has one way, from the first to the second.
            ways = 1 if each.kind == "collective-permute" else len(sizes)
            pairs += 1 if each.kind == "collective-permute" else len(group)
            across += ways if len(sizes) > 1 else 0
    return each.bytes_sent * across / pairs
