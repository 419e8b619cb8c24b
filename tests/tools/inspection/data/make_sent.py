"""Compiles three programs for TPU slices and GPU clusters that are not there, for test_pods.py.

python make_sent.py FOLDER v5p:16x16x16 …: needs libtpu or JAX for CUDA, as `crossshard plan` does.
Writes what `inspect` says of each, and the program reduced to what communicates, which is here.
"""

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import crossshard
from crossshard.tools.inspection.collectives import called_computations
from crossshard.tools.inspection.hlo import Computation, Instruction, end_of_bracket, parse
from crossshard.tools.planning import topology

# Three matrices, of which every number of chips up to 4,096 has a slice in whole rows of 128, and
# an array that is too small to be split.
PARAMS = {
    "shift": jax.ShapeDtypeStruct((512,), jnp.float32),
    "first": jax.ShapeDtypeStruct((512, 1024), jnp.float32),
    "second": jax.ShapeDtypeStruct((1024, 1024), jnp.float32),
    "third": jax.ShapeDtypeStruct((1024, 1024), jnp.float32),
}
SUMMED, GATHERED = (512, 384), (16, 256)


def loss_fn(params: Any, x: Any) -> Any:
    hidden = x + params["shift"]
    for name in ("first", "second", "third"):
        hidden = jnp.tanh(hidden @ params[name])
    return jnp.mean(hidden**2)


def ours(mesh: Any, weight_update: str) -> Any:
    step = crossshard.make_train_step(
        loss_fn, optax.adamw(1e-3), mesh=mesh, weight_update=weight_update
    )
    batch = jax.ShapeDtypeStruct((8 * mesh.size, 512), jnp.float32)
    return step.lower(step.abstract_init(PARAMS), batch)


def plain(mesh: Any) -> Any:
    """A sum, and a gather of a piece of each device."""
    run = jax.shard_map(
        lambda x, y: (lax.psum(x, "shards"), lax.all_gather(y, "shards", tiled=True)),
        mesh=mesh, in_specs=(P(), P("shards")), out_specs=P(), check_vma=False,
    )  # fmt: skip
    given = lambda shape, spec: jax.ShapeDtypeStruct(
        shape, jnp.float32, sharding=NamedSharding(mesh, spec)
    )
    rows, width = GATHERED
    return jax.jit(run).lower(given(SUMMED, P()), given((mesh.size * rows, width), P("shards")))


PROGRAMS = {
    "replicated": lambda mesh: ours(mesh, "replicated"),
    "sharded": lambda mesh: ours(mesh, "sharded"),
    "plain": plain,
}


def reduced(text: str) -> str:
    """The collectives of a program and what calls them; other operands and results as inputs."""
    module = parse(text)
    lines = {
        found[1]: line
        for line in text.splitlines()
        if (found := re.match(r"\s+(?:ROOT )?%?([\w.-]+) = ", line))
    }

    def is_kept(each: Instruction) -> bool:
        return any(kind in each.opcode for kind in KINDS) or any(
            is_kept(inner)
            for computation in called_computations(module, each)
            for inner in computation.instructions.values()
        )

    def called(each: Instruction) -> list[Computation]:
        found = called_computations(module, each)
        inner = [i for c in found for i in c.instructions.values()]
        return [c for i in inner for c in called(i)] + found

    entry = module.entry.instructions.values()
    kept = {each.name for each in entry if is_kept(each)}
    given = {name for each in entry if each.name in kept for name in each.operands} - kept
    blocks = {c.name: c.instructions.values() for e in entry if e.name in kept for c in called(e)}
    body = []
    for each in entry:
        line = _bare(lines[each.name])
        if each.name in given or (each.is_root and each.name not in kept):
            line = f"{line.partition(' = ')[0]} = {_shape(line)} parameter({len(body)})"
        if each.name in given | kept or each.is_root:
            body.append(line)
    texts = {name: [_bare(lines[i.name]) for i in inner] for name, inner in blocks.items()}
    text = [f"HloModule reduced, num_partitions={module.partitions}"]
    text += [_block(f"%{name}", inner) for name, inner in texts.items()]
    return "\n".join([*text, _block(f"ENTRY %{module.entry.name}", body)])


def _bare(line: str) -> str:
    line = re.sub(r", metadata=\{[^}]*\}", "", line)
    while (start := line.find(", backend_config={")) >= 0:
        line = line[:start] + line[end_of_bracket(line, line.index("{", start)) :]
    return re.sub(
        r"replica_groups=(\{\{.*?\}\})", lambda found: f"replica_groups={_short(found[1])}", line
    )


def _short(groups: str) -> str:
    """Groups as XLA writes them for GPUs, where there are thousands of devices."""
    rows = np.array(json.loads(groups.replace("{", "[").replace("}", "]")))
    number, size = rows.shape
    ids = np.arange(rows.size)
    if rows.size <= 64:
        return groups
    if (rows == ids.reshape(rows.shape)).all():
        return f"[{number},{size}]<=[{rows.size}]"
    assert (rows == ids.reshape(size, number).T).all()
    return f"[{number},{size}]<=[{size},{number}]T(1,0)"


def _shape(line: str) -> str:
    value = line.partition(" = ")[2]
    return value[: end_of_bracket(value, 0)] if value[0] == "(" else value.partition(" ")[0]


def _block(head: str, lines: list[str]) -> str:
    return "\n".join(["", f"{head} () -> () {{", *lines, "}", ""])


KINDS = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "collective-permute")

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    for name in sys.argv[2:]:
        where = topology(name)
        mesh = where.mesh({"shards": where.size})
        for program, lower in PROGRAMS.items():
            compiled = lower(mesh).compile()
            path = folder / f"sent_{name.replace(':', '_')}_{program}"
            path.with_suffix(".json").write_text(crossshard.inspect(compiled).to_json())
            path.with_suffix(".hlo").write_text(reduced(compiled.as_text()))
