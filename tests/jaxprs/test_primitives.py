"""Primitives: each of the installed JAX has a rule or was read; an unknown one has none."""

import importlib
import pkgutil
import re
import sys
from pathlib import Path

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import Primitive
from jax.sharding import PartitionSpec as P

from crossshard.jaxprs import primitives
from crossshard.jaxprs.slices import why_not_elementwise
from crossshard.jaxprs.walk import sources, varying_axes_of_outputs
from tests.jaxprs.proving import over_rows

# Of kernels and experiments: their own tables, and code that needs what is not here.
LEFT_OUT = r"jax\.(_src\.(pallas|test|tpu_custom|mosaic|export|debugger|thunky)|experimental|tools)"
# Those without rules, which a person has read in November 2026, in JAX 0.10.2 to 0.12.0.1.
UNKNOWN = set((Path(__file__).parent / "unknown.txt").read_text(encoding="utf-8").split())


def installed() -> set[str]:
    """The names of the primitives that JAX has without what is left out."""
    for module in pkgutil.walk_packages(jax.__path__, "jax."):
        if module.name.startswith("jax._src.") and not re.match(LEFT_OUT, module.name):
            try:
                importlib.import_module(module.name)
            except ImportError:  # of a package that is not here
                continue
    loaded = [name for name in sys.modules if name.startswith("jax._src.")]
    modules = [sys.modules[name] for name in loaded if not re.match(LEFT_OUT, name)]
    found = (each for module in modules for each in vars(module).values())
    return {str(each.name) for each in found if isinstance(each, Primitive)}


def test_each_primitive_of_the_installed_jax_has_a_rule_or_was_read():
    """A new one is read by a person, and put where it belongs, or among the unknown."""
    lax = {str(each.name) for each in vars(jax.lax).values() if isinstance(each, Primitive)}
    assert len(installed()) > len(lax) > 100
    assert sorted(installed() - primitives.KNOWN - UNKNOWN) == []
    assert sorted(primitives.KNOWN & UNKNOWN) == []
    tables = [x for name, x in vars(primitives).items() if name.isupper()]
    assert set().union(*tables) <= primitives.KNOWN


unknown = Primitive("tests.unknown")
unknown.def_abstract_eval(lambda x: x)


def test_an_unknown_primitive_is_unknown_to_the_analyses():
    found = over_rows(lambda x, w, own: unknown.bind(x @ w).mean(), jnp.ones((4, 3)), jnp.ones(3))
    # Numbers have to show that it computes each row alone.
    assert "tests.unknown" in found.assumes[0]
    sgd = optax.sgd(0.1)

    def update(params, state, gradients):
        updates, state = sgd.update(gradients, state, params)
        return optax.apply_updates(params, jax.tree.map(unknown.bind, updates)), state

    types = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8,), (4,))]
    given = [(each, sgd.init(each), each) for each in types]
    assert "tests.unknown" in str(why_not_elementwise(update, *given))


def called_back(x: jax.Array) -> jax.Array:
    """The same on all shards as far as the inputs tell."""
    return jax.experimental.io_callback(np.abs, jax.ShapeDtypeStruct((), x.dtype), x)


def test_what_has_an_effect_is_unknown_to_the_analyses():
    assert sources(lambda x, y: called_back(y), 1.0, 2.0) == [-1]

    mesh = jax.make_mesh((8,), ("shards",), axis_types=(jax.sharding.AxisType.Auto,))
    where = {"mesh": mesh, "in_specs": P(), "out_specs": P(), "check_vma": False}
    sharded = jax.make_jaxpr(jax.shard_map(called_back, **where))(jnp.float32(1))
    assert varying_axes_of_outputs(sharded) == [{"shards"}]

    def update(params, state, gradients):
        return params - called_back(state) * gradients, state

    types = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8,), (4,), ())]
    given = [(each, types[2], each) for each in types[:2]]
    assert "io_callback, which has an effect" in str(why_not_elementwise(update, *given))
