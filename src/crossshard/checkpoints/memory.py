"""Memory: keeps the last states of a run in the memory of each host, which outlives the process.

Each process writes the parts of the state that its devices hold, once for each host, as bytes;
with two copies, those of the next host as well. A host that has come back without its memory gets
its parts from the one that has the copies, over the mesh.
"""

import contextlib
import dataclasses
import json
import math
import mmap
import os
import re
import shutil
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from crossshard import _check, _mesh
from crossshard._hash import sha256
from crossshard.checkpoints import storage
from crossshard.checkpoints.data import PASS_THE_SAME
from crossshard.checkpoints.folder import MOST_BYTES, Damaged, in_words, read_json
from crossshard.checkpoints.hosts import Bounds, Hosts, bounds_of, holders, own_pieces, size_of
from crossshard.checkpoints.manifest import Fingerprint, Manifest, as_manifest, manifest_of
from crossshard.distributed.agreement import compare, exchange, processes_of
from crossshard.distributed.identity import machine, private_folder
from crossshard.errors import ArgumentError, CheckpointWarning
from crossshard.model.layout import StateLayout
from crossshard.model.state import TrainState

# How many whole snapshots are kept; a third one may be under way.
_KEPT = 2
# The number of a snapshot, and what tells the run and the processes that wrote it from others.
_NAME = re.compile(r"(\d{8,10})-([0-9a-f]{16})-([0-9a-f]{16})", re.ASCII)


@dataclasses.dataclass(frozen=True)
class _Part:
    """Some elements of one array, in a file of bytes."""

    leaf: int
    bounds: list[list[int]]
    dtype: str
    offset: int
    crc: int


# The bounds of a part, and what is within them.
_Values = tuple[Sequence[Sequence[int]], np.ndarray]


class Snapshots:
    """The snapshots of a run in a folder of this host, of which the last two whole ones stay.

    Args:
      folder: the folder in memory; private to this user, and created so.
      run: what tells the run from others.
      mesh: the mesh of the step.
      copies: how many hosts have each part of the state, at least.

    Raises:
      ArgumentError, ArgumentTypeError: not a folder, or one that others may write to or read; or
        there are copies, and the hosts do not have equally many devices.
      DistributedError: it cannot be created.
    """

    def __init__(self, folder: Any, run: str, mesh: Mesh, copies: int = 1):
        self.path = private_folder("memory", folder, "'/dev/shm/my-run'")
        self._run, self._mesh = run, mesh
        told = exchange("Checkpoints", json.dumps([machine(), os.urandom(8).hex()]), mesh)
        found = [json.loads(each) for each in told]
        processes = processes_of(mesh) if len(found) > 1 else (jax.process_index(),)
        by_host: dict[str, list[int]] = {}
        for process, (host, _) in zip(processes, found, strict=True):
            by_host.setdefault(host, []).append(process)
        self._hosts = Hosts(mesh, tuple(map(tuple, by_host.values())))
        # What tells this start of the run from earlier ones.
        self._start: str = found[0][1]
        self._copies = copies if len(by_host) > 1 else 1
        if self._copies > 1 and not self._hosts.are_alike:
            raise ArgumentError(
                f"memory_copies={copies} gives each device's part to a device of another host, and "
                f"they have {self._hosts.numbers} devices. Pass memory_copies=1."
            )
        # One thread that stays: starting another one takes as long as a step may.
        self._writer = ThreadPoolExecutor(1, "crossshard")
        self._writing: Future[None] | None = None
        self._failed = ""
        # The name of the snapshot that this process has written last, and those that all have.
        self._written, self._whole = "", [name for name, _ in self.candidates()][-_KEPT:]
        self._last = max((int(name.partition("-")[0]) for name in self._whole), default=-1)
        self._delete(lambda name: name in self._whole)
        # How many steps the state of the last snapshot has taken; ``None`` before.
        self._taken: int | None = None
        self._leaves: tuple[StateLayout, list[storage.Leaf]] | None = None

    @property
    def has_any(self) -> bool:
        """Whether there are snapshots of this run."""
        return bool(self._whole)

    # Writing.

    def after(self, taken: int) -> int:
        """Return the least number of a checkpoint of the state after so many steps."""
        self.wait()
        return self._last if taken == self._taken else self._last + 1

    def forget_count(self) -> None:
        """Forget how many steps the last state has taken, since another one may follow it."""
        self.wait()
        self._taken = None

    def take(
        self,
        layout: StateLayout,
        state: TrainState,
        fingerprint: Fingerprint,
        data: Any,
        newest: tuple[int, int | None],
    ) -> None:
        """Copy a state, and begin to write it; the next step may donate it.

        ``newest`` is the number of the newest checkpoint, and how many steps its state has taken.
        What cannot be written is a warning, and the snapshots before it stay.
        """
        self.wait()
        if self._leaves is None or self._leaves[0] is not layout:
            self._leaves = layout, storage.leaves_of(layout, state, layout.number_of_shards)
        leaves = self._leaves[1]
        with _mesh.in_place_of_the_users_mesh(layout.mesh):
            arrays = list(map(storage.to_disk, leaves, jax.tree.leaves(state)))
            of_next = self._of_next_host(arrays)
        # JAX refuses an array on one device while a mesh of several is set.
        with _mesh.without_mesh():
            pieces = [
                (place, bounds, _kept(piece))
                for place, x in enumerate(arrays)
                for bounds, piece in own_pieces(x, x, self._hosts.here, place)
            ]
            pieces += [(place, bounds, _kept(piece)) for place, bounds, piece in of_next]
            count = _kept(state.step.addressable_data(0))
        self._agree(data)
        manifest = manifest_of(layout, state, leaves, fingerprint, data)
        self._writing = self._writer.submit(self._write, manifest, count, pieces, newest)

    def _of_next_host(self, arrays: list[jax.Array]) -> list[tuple[int, Bounds, jax.Array]]:
        """Return the parts that the next host writes and this one has not, sent to its devices."""
        if self._copies == 1:
            return []
        lacking = [place for place, x in enumerate(arrays) if not self._hosts.have_all(x)]
        sent = self._hosts.sent_back([arrays[place] for place in lacking], 1)
        after, next_host = self._hosts.devices_after(1), self._hosts.processes_after(1)
        return [
            (place, bounds, piece)
            for place, x in zip(lacking, sent, strict=True)
            for bounds, piece in own_pieces(x, arrays[place], next_host, place, after)
            if bounds not in holders(arrays[place].sharding, x.shape, self._hosts.here)
        ]

    def wait(self) -> None:
        """Wait until the last snapshot is written."""
        if self._writing is not None:
            self._writing.result()
            self._writing = None
        if self._failed:
            warnings.warn(
                f"A snapshot was not written to {self.path}: {self._failed}. The run goes on, with "
                f"the snapshots before it and the checkpoints on disk.",
                CheckpointWarning,
                stacklevel=4,
            )
            self._failed = ""

    def close(self, newest: int) -> None:
        """Wait, and delete the snapshots that no restore would choose over that checkpoint."""
        self.wait()
        self._writer.shutdown()
        self._writer = ThreadPoolExecutor(1, "crossshard")
        self._delete(lambda name: int(name.partition("-")[0]) > newest)

    def _agree(self, data: Any) -> None:
        """Tell the others what this process has written, delete what earlier starts have left.

        And raise unless all of them pass the same data.
        """
        of_data = lambda: f"checksum {sha256(dataclasses.asdict(data))[:8]}"
        given = lambda: {"data": of_data(), "what it has written": self._written}
        found = compare("snapshot", given, self._mesh)
        if found is not None and found.name == "data":
            raise found.refusal("snapshot", PASS_THE_SAME)
        if found is None and self._written and self._written not in self._whole:
            self._whole = [*self._whole, self._written][-_KEPT:]
        self._delete(lambda name: name in self._whole or name.endswith(self._start))

    def _delete(self, stays: Callable[[str], bool]) -> None:
        """Delete what does not stay, in the first process of the host."""
        if jax.process_index() == self._hosts.here[0]:
            for path in self.path.iterdir():
                if _NAME.fullmatch(path.name) and not stays(path.name):
                    shutil.rmtree(path, ignore_errors=True)

    def _write(
        self, manifest: Manifest, count: Any, pieces: list[Any], newest: tuple[int, int | None]
    ) -> None:
        path = None
        try:
            # Only now, since the step may still run when the snapshot is taken.
            step, (on_disk, taken) = int(np.asarray(count)), newest
            number = max(step, self._last + 1, on_disk if step == taken else on_disk + 1)
            self._last, self._taken = number, step
            name = f"{number:08d}-{self._run}-{self._start}"
            path, parts, offset = self.path / name, [], 0
            path.mkdir(mode=0o700, exist_ok=True)
            with open(self._file_in(path), "r+b") as opened:
                # Each is given back once it is written.
                for place, bounds, piece in _taken(pieces):
                    array = np.ascontiguousarray(np.asarray(piece))
                    content = array.reshape(-1).view(np.uint8).data
                    crc, within = zlib.crc32(content), list(map(list, bounds))
                    parts.append(_Part(place, within, str(array.dtype), offset, crc))
                    opened.write(content)
                    offset += content.nbytes
                opened.truncate()
            manifest = dataclasses.replace(manifest, number=number, step=step)
            held = self._hosts.here
            if self._copies > 1:
                held += self._hosts.processes_after(1)
            body = {
                "here": self._hosts.here,
                "held": held,
                "all": self._hosts.processes,
                "parts": list(map(dataclasses.astuple, parts)),
            }
            text = json.dumps({**body, "sha256": sha256(body), "manifest": manifest.to_json()})
            # Its name is given last: with it the parts of this process are whole.
            unnamed = path / f"{jax.process_index()}.unfinished"
            unnamed.write_text(text)
            unnamed.rename(path / f"{jax.process_index()}.json")
            self._written = name
        except Exception as error:
            self._failed = in_words(error)
            if path is not None:
                (path / f"{jax.process_index()}.bytes").unlink(missing_ok=True)

    def _file_in(self, path: Path) -> Path:
        """Return the file of this process in a new snapshot.

        It is that of one that is no longer needed, if there is one: memory that is new is filled
        with zeros first, which takes as long as to write to it.
        """
        found = path / f"{jax.process_index()}.bytes"
        for old in self.path.glob(f"*-{self._start}"):
            if old.name not in self._whole and old != path:
                (old / f"{jax.process_index()}.json").unlink(missing_ok=True)
                with contextlib.suppress(OSError):
                    (old / found.name).rename(found)
                # The last process of the host deletes it.
                with contextlib.suppress(OSError):
                    old.rmdir()
        found.touch(mode=0o600)
        return found

    # Reading.

    def candidates(self) -> list[tuple[str, "Snapshot"]]:
        """Return the names of the snapshots that are whole, ascending; all processes call it.

        Of each the hosts together have the parts of all processes that wrote it.
        """
        own: dict[str, Any] = {}
        for path in sorted(self.path.iterdir()):
            found = _NAME.fullmatch(path.name)
            if found is not None and found[2] == self._run and path.is_dir():
                held = Snapshot(path, self._hosts).held()
                own |= {path.name: held} if held else {}
        told = [json.loads(each) for each in exchange("restore", json.dumps(own), self._mesh)]
        whole = []
        for name in sorted({name for each in told for name in each}):
            having = [each[name] for each in told if name in each]
            if {process for held, _ in having for process in held} >= set(having[0][1]):
                here = Snapshot(self.path / name, self._hosts)
                if len(having) < len(told):
                    here.share_manifest(name in own)
                whole.append((name, here))
        return whole


class Snapshot:
    """One snapshot, as this host has it: what ``read_state`` reads a state from.

    Attributes:
      number: its number.
      name: what it is called in messages.
      has_hashes: whether its manifest has the hashes of the arrays; each part has a checksum.
    """

    has_hashes = False

    def __init__(self, path: Path, hosts: Hosts):
        self.number = int(path.name.partition("-")[0])
        self.name = f"Snapshot {self.number} in {path.parent}"
        self._path, self._hosts = path, hosts
        # Its manifest from another host; ``None`` if this one has it.
        self._shared: dict[str, Any] | None = None

    def held(self) -> tuple[list[int], list[int]] | None:
        """Return whose parts are here, and who wrote it; ``None`` unless all are here."""
        found = {path.stem for path in self._path.glob("*.json")}
        try:
            index = self._index(min(found)) if found else {"here": [-1]}
            return (index["held"], index["all"]) if found == {*map(str, index["here"])} else None
        except Damaged:
            return None

    def share_manifest(self, has_it: bool) -> None:
        """Send the manifest to the hosts that have none; all processes call it."""
        own = ""
        with contextlib.suppress(Damaged):
            own = json.dumps(self._first_index()["manifest"]) if has_it else ""
        of_all = exchange("restore", own, self._hosts.mesh)
        self._shared = None if own else json.loads(next(filter(None, of_all), "null"))

    def manifest(self) -> Manifest:
        """Return the manifest; raise as ``read_manifest`` does."""
        found = self._shared or self._first_index()["manifest"]
        return as_manifest(found, self._path, self.number)

    def _first_index(self) -> dict[str, Any]:
        names = sorted(path.stem for path in self._path.glob("*.json"))
        if not names:
            raise Damaged("it is gone")
        return self._index(names[0])

    def read(self, leaves: Mapping[int, storage.Leaf], number: int) -> dict[int, jax.Array]:
        """Read arrays onto the mesh, by their places; each process reads what its devices hold.

        Raises:
          Damaged: in all processes, if no host has the parts that one of them needs.
        """
        parts, why = self._parts(leaves)
        source = self._sources(leaves, parts, why)
        own, found = self._hosts.own, list[jax.Array]()
        for distance in sorted({*source}):
            # What this host has for another one; without it, zeros that nobody takes.
            gives = source[(own + distance) % len(source)] == distance
            devices = self._hosts.devices_after(distance)
            arrays = [
                _array(leaf, parts[place] if gives else [], devices)
                for place, leaf in leaves.items()
            ]
            if distance:
                with _mesh.in_place_of_the_users_mesh(self._hosts.mesh):
                    # What a host has for one after it goes forward.
                    arrays = self._hosts.sent_back(arrays, -distance)
            # All of them send, and each takes its own.
            found = arrays if source[own] == distance else found
        return dict(zip(leaves, found, strict=True))

    def _parts(self, leaves: Mapping[int, storage.Leaf]) -> tuple[dict[int, list[_Values]], str]:
        """Return the parts of arrays that are whole here, and what is wrong with another one."""
        found: dict[int, list[_Values]] = {place: [] for place in leaves}
        why = ""
        for file in sorted(self._path.glob("*.json")):
            try:
                content = _mapped(file.with_suffix(".bytes"))
                for given in self._index(file.stem)["parts"]:
                    part = _check.typed(_Part, dict(zip(_PART, given, strict=True)))
                    leaf = leaves.get(part.leaf)
                    values = None if leaf is None else _values(part, content, leaf.on_disk)
                    if values is not None:
                        found[part.leaf].append((part.bounds, values))
                    elif leaf is not None:
                        why = why or f"{leaf.path} has not the values that were written"
            except Damaged as error:
                why = why or str(error)
            except (TypeError, ValueError):
                why = why or "its index has values of a wrong type"
        return found, why

    def _sources(
        self, leaves: Mapping[int, storage.Leaf], parts: Mapping[int, list[_Values]], why: str
    ) -> list[int]:
        """Return for each host how many places before it the next one is that has its parts."""
        hosts = self._hosts

        def has(distance: int) -> bool:
            its = hosts.processes_after(distance)
            return all(
                _has_all(bounds, parts[place])
                for place, leaf in leaves.items()
                for bounds in holders(leaf.on_disk.sharding, leaf.on_disk.shape, its)
            )

        distances = range(len(hosts) if hosts.are_alike else 1)
        own = json.dumps([hosts.own, list(map(has, distances)), why])
        told = [json.loads(each) for each in exchange("restore", own, hosts.mesh)]
        of_hosts = {host: its for host, its, _ in told}
        found = []
        for host in range(len(hosts)):
            near = (each for each in distances if of_hosts[(host - each) % len(hosts)][each])
            found.append(next(near, -1))
        if -1 in found:
            whys = filter(None, (why for *_, why in told))
            raise Damaged(next(whys, "not all of its parts are there"))
        return found

    def _index(self, process: str) -> dict[str, Any]:
        try:
            found = read_json(self._path / f"{process}.json", MOST_BYTES)
            body = {key: found[key] for key in ("here", "held", "all", "parts")}
            if found["sha256"] != sha256(body) or not isinstance(found["manifest"], dict):
                raise ValueError("it does not have its checksum")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise Damaged(f"its index cannot be read ({error!s:.100})") from None
        return found


_PART = [field.name for field in dataclasses.fields(_Part)]


def _values(part: _Part, content: memoryview, like: jax.ShapeDtypeStruct) -> np.ndarray | None:
    """Return the values of a part; ``None`` if they are not those that were written."""
    within = zip(part.bounds, like.shape, strict=True)
    fits = all(0 <= start <= end <= length for (start, end), length in within)
    shape, dtype = [end - start for start, end in part.bounds], np.dtype(like.dtype)
    found = content[part.offset : part.offset + math.prod(shape) * dtype.itemsize]
    if not fits or part.dtype != str(dtype) or zlib.crc32(found) != part.crc:
        return None
    return np.frombuffer(found, np.uint8).view(dtype).reshape(shape)


def _array(leaf: storage.Leaf, parts: list[_Values], after: Mapping[Any, Any]) -> jax.Array:
    """Make an array whose devices hold the parts of those after them; zeros without parts."""
    like, found = leaf.on_disk, dict[Bounds, np.ndarray]()
    indices, made = like.sharding.devices_indices_map(like.shape), list[jax.Array]()
    for device in like.sharding.addressable_devices:
        bounds = bounds_of(indices[after[device]], like.shape)
        if bounds not in found:
            found[bounds] = _filled(bounds, parts, np.dtype(like.dtype))
        made.append(jax.device_put(found[bounds], device))
    return jax.make_array_from_single_device_arrays(like.shape, like.sharding, made)


def _has_all(bounds: Bounds, parts: list[_Values]) -> bool:
    """Return whether parts, of which no two overlap, have all elements within bounds."""
    return size_of(bounds) == sum(size_of(_both(bounds, its)) for its, _ in parts)


def _both(bounds: Bounds, other: Sequence[Sequence[int]]) -> Bounds:
    """Return the bounds within both, empty if there is nothing."""
    return tuple(
        (max(start, first), max(start, first, min(end, last)))
        for (start, end), (first, last) in zip(bounds, other, strict=True)
    )


def _filled(bounds: Bounds, parts: list[_Values], dtype: np.dtype) -> np.ndarray:
    """Return the elements of an array within bounds, out of the parts that hold some of them."""
    made = np.zeros([end - start for start, end in bounds], dtype)
    for its, values in parts:
        both = _both(bounds, its)
        if size_of(both):
            made[_within(both, bounds)] = values[_within(both, its)]
    return made


def _within(bounds: Sequence[Sequence[int]], outer: Sequence[Sequence[int]]) -> tuple[slice, ...]:
    """Return where bounds lie in an array that has these outer bounds."""
    pairs = zip(bounds, outer, strict=True)
    return tuple(slice(start - first, end - first) for (start, end), (first, _) in pairs)


def _kept(piece: jax.Array) -> Any:
    """Return a copy of an array on one device, which stays when the array is donated."""
    # A view of a CPU device's memory: JAX does not reuse that as long as there is one.
    return np.asarray(piece) if _is_on_cpu(piece) else jnp.copy(piece)


def _is_on_cpu(x: jax.Array) -> bool:
    """Return whether an array is on one CPU device."""
    device: Any = x.device
    return bool(device.platform == "cpu")


def _taken(pieces: list[Any]) -> Iterator[Any]:
    """Yield the elements of a list, which no longer has them."""
    pieces.reverse()
    while pieces:
        yield pieces.pop()


def _mapped(file: Path) -> memoryview:
    try:
        with open(file, "rb") as opened:
            if not os.fstat(opened.fileno()).st_size:
                return memoryview(b"")
            return memoryview(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ))
    except (OSError, ValueError) as error:
        raise Damaged(f"its parts cannot be read ({in_words(error)})") from None
