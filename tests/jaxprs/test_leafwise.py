"""Whether an update runs leaf by leaf: which leaves are cut, and what they have in common."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.flatten_util import ravel_pytree
from optax import contrib

from crossshard.jaxprs.leafwise import Leafwise, NotLeafwise, find_leafwise
from tests.optimizers.table import across_leaves

SHARDS = 4
# In the order of their names: a matrix, a stack of them, one of few numbers, a long vector.
PARAMS = {
    "a": jnp.zeros((16, 12)),
    "layers": jnp.zeros((8, 6, 4)),
    "tiny": jnp.zeros(3),
    "v": jnp.zeros(20),
}
A, LAYERS, V = 0, 1, 3
SLICES = {A: (4, 12), LAYERS: (2, 6, 4), V: (5,)}


def found(optimizer: Any, **options: Any) -> Leafwise:
    optimizer = optax.with_extra_args_support(optimizer)
    state = jax.eval_shape(optimizer.init, PARAMS)

    def update(params: Any, state: Any, gradients: Any, loss: Any) -> Any:
        return optimizer.update(gradients, state, params, value=loss)

    stacks = options.pop("stacks", {LAYERS: (2, 6, 4)})
    loss = jax.ShapeDtypeStruct((), "float32")
    return find_leafwise(update, PARAMS, state, [loss], SLICES, stacks, **options)


def matrices(params: Any) -> Any:
    of = lambda x: contrib.MuonDimensionNumbers((x.ndim - 2,), (x.ndim - 1,))
    return jax.tree.map(lambda x: of(x) if x.ndim > 1 else None, params)


def stateless(function: Callable[[Any], Any]) -> optax.GradientTransformation:
    return optax.stateless(lambda updates, params: function(updates))


CLIP = optax.clip_by_global_norm(1.0)
# The leaves that are cut, those that are cut between layers, and the number of scalars.
CASES: dict[str, tuple[Any, set[int], set[int], int]] = {
    "sgd": (optax.sgd(0.1), {A, LAYERS, V}, set(), 0),
    "adam": (optax.adam(0.1), {A, LAYERS, V}, set(), 0),
    "a clip by the global norm": (optax.chain(CLIP, optax.sgd(0.1)), {A, LAYERS, V}, set(), 3),
    "lamb": (optax.lamb(0.1), {A, LAYERS, V}, set(), 12),
    "a check of all": (optax.apply_if_finite(optax.sgd(0.1), 3), {A, LAYERS, V}, set(), 3),
    "muon": (contrib.muon(0.1), {LAYERS, V}, set(), 0),
    "muon of layers": (contrib.muon(0.1, muon_weight_dimension_numbers=matrices), {V}, {LAYERS}, 0),
    "a clip and muon": (
        *(optax.chain(CLIP, contrib.muon(0.1, muon_weight_dimension_numbers=matrices)),),
        *({V}, {LAYERS}, 3),
    ),
    "adafactor": (optax.adafactor(0.1, min_dim_size_to_factor=4), set(), set(), 0),
    "centralized": (optax.chain(optax.centralize(), optax.sgd(0.1)), {V}, {LAYERS}, 0),
    # One second moment for each leaf, which every shard has.
    "novograd": (optax.novograd(0.1), set(), set(), 3),
    "noise": (optax.add_noise(0.1, 0.1, 0), set(), set(), 0),
    "prodigy": (contrib.prodigy(0.1), {A, LAYERS, V}, set(), 6),
    "several steps": (
        optax.MultiSteps(contrib.muon(0.1), 2).gradient_transformation(),
        *({LAYERS, V}, set(), 0),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_leaves_are_cut_where_this_computes_the_same(name: str):
    optimizer, cut, stacked, scalars = CASES[name]
    leafwise = found(optimizer)
    assert leafwise.stacked == stacked
    assert set(SLICES) - set(leafwise.whole) - stacked == cut
    assert len(leafwise.scalars) == scalars
    assert all(leafwise.whole.values())


def test_the_state_is_of_the_leaf_that_it_is_updated_with():
    leafwise = found(optax.chain(CLIP, optax.adam(0.1)))
    # The count, mu and nu; what is tiny every shard has.
    assert leafwise.of_state == (None, *(A, LAYERS, None, V) * 2)


def test_a_leaf_that_stays_whole_says_why_and_where():
    why = found(contrib.muon(0.1)).whole[A]
    assert "over a full parameter (scale_by_muon, optax/contrib/_muon.py:" in why
    why = found(optax.adafactor(0.1, min_dim_size_to_factor=4)).whole[A]
    assert "its state has an array of another shape" in why
    why = found(optax.novograd(0.1)).whole[LAYERS]
    assert "over a full parameter (scale_by_novograd" in why
    assert "; nor between layers: " in why


def test_scalars_of_scalars_wait_for_them():
    norms = optax.chain(CLIP, optax.adaptive_grad_clip(0.1), optax.normalize_by_update_norm())
    levels = {each.level for each in found(norms).scalars}
    assert levels == {0, 1} or levels == {0, 1, 2}


def test_a_sum_of_a_cut_leaf_is_a_sum_of_parts_and_one_of_a_whole_leaf_is_its_owners():
    leafwise = found(optax.chain(CLIP, contrib.muon(0.1)))
    reduced = {each.leaf: each.reduced for each in leafwise.scalars}
    assert reduced == {A: "", LAYERS: "reduce_sum", V: "reduce_sum"}
    finite = found(optax.apply_if_finite(optax.sgd(0.1), 3)).scalars
    assert {each.reduced for each in finite} == {"reduce_and"}


def test_padding_is_left_out_of_a_sum():
    leafwise = found(optax.chain(CLIP, optax.sgd(0.1)), padded=[V])
    assert leafwise.masks == (V,)
    padded = found(optax.sgd(0.1), padded=[V])
    assert padded.masks == ()


@pytest.mark.parametrize(
    "rule",
    [
        across_leaves(0.1),
        stateless(lambda g: {**g, "a": g["a"] + g["v"][:12]}),
        stateless(lambda g: {**g, "v": g["a"].sum(1)[0] + jnp.tile(g["layers"][0, 0], 5)}),
        stateless(lambda g: {**g, "tiny": g["v"][:3]}),
        stateless(lambda g: ravel_pytree(g)[1](ravel_pytree(g)[0][::-1])),
    ],
    ids=["a mean of all", "added", "several", "a part of another", "turned around"],
)
def test_a_leaf_that_is_computed_from_another_is_refused(rule: Any):
    with pytest.raises(NotLeafwise, match="a leaf is computed from the arrays of another one"):
        found(rule)


def test_effects_are_refused():
    def loud(updates: Any) -> Any:
        jax.debug.print("{}", updates["tiny"])
        return updates

    with pytest.raises(NotLeafwise, match="effects"):
        found(stateless(loud))


def test_without_stacks_a_stack_stays_whole():
    leafwise = found(contrib.muon(0.1, muon_weight_dimension_numbers=matrices), stacks={})
    assert leafwise.stacked == set()
    assert LAYERS in leafwise.whole
