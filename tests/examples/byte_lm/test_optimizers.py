"""Optimizers by name: found, given their learning rate, and refused for a reason."""

import jax.numpy as jnp
import optax
import optax.contrib
import pytest

from crossshard.errors import ArgumentError
from examples.byte_lm.optimizers import make_optimizer

# Those whose learning rate we choose, or that choose it themselves, with what the outcome is.
RATES = {
    "adafactor": 0.02,
    "adadelta": 2.0,
    "adamw": 2e-3,
    "cocob": 1.0,
    "dog": 1.0,
    "momo_adam": 0.01,
    "polyak_sgd": 1.0,
    "schedule_free_adamw": 0.0025,
    "sgd": 0.3,
}


def test_the_learning_rate_is_the_optimizers_own_or_one_that_suits_it():
    assert {name: make_optimizer(name, None).learning_rate for name in RATES} == RATES


@pytest.mark.parametrize("name", ["sgd", "optax.sgd", "polyak_sgd", "contrib.muon", "dowg"])
def test_a_given_learning_rate_reaches_the_optimizer(name):
    params = {"w": jnp.full((3, 3), 2.0)}

    def first_update(rate: float) -> float:
        inner = make_optimizer(name, rate)
        assert inner.learning_rate == rate
        transformation = optax.with_extra_args_support(inner.transformation)
        state = transformation.init(params)
        updates, _ = transformation.update(params, state, params, value=jnp.float32(18.0))
        return float(jnp.abs(updates["w"]).max())

    assert first_update(0.02) == pytest.approx(2 * first_update(0.01), rel=1e-4)


def test_a_cosine_ends_near_zero():
    params, sizes = {"w": jnp.ones(3)}, []
    inner = make_optimizer("sgd", 0.5, cosine_steps=40)
    state = inner.transformation.init(params)
    for _ in range(40):
        updates, state = inner.transformation.update(params, state, params)
        sizes.append(-float(updates["w"][0]))
    assert inner.learning_rate == max(sizes) == 0.5
    assert sizes.index(0.5) == 2
    assert sizes[-1] < 0.01


def test_steps_that_are_too_long_are_the_users_choice():
    assert make_optimizer("optimistic_gradient_descent", 2.7).learning_rate == 2.7


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("adamm", "no optimizer 'adamm'.*adamw"),
        ("", "no optimizer ''"),
        ("l2_loss", "could not be created: .*'predictions'"),
        ("sam", "could not be created: .*'optimizer' and 'adv_optimizer'"),
        ("mechanize", "could not be created: .*'base_optimizer'"),
        ("no_such_module:sgd", "No module named 'no_such_module'"),
        ("optax:no_such_factory", "no optimizer 'optax:no_such_factory'"),
        ("optax:__version__", "no optimizer"),
        ("sgd:", "No module named 'sgd'"),
        (":sgd", "could not be created: ValueError"),
        ("json:JSONDecoder", "not an optimizer"),
    ],
)
def test_what_is_not_a_usable_optimizer_is_refused_with_the_reason(name, reason):
    with pytest.raises(ArgumentError, match=reason):
        make_optimizer(name, None)


def test_a_factory_of_ones_own_is_found_on_the_path(tmp_path, monkeypatch):
    (tmp_path / "my_optimizers_here.py").write_text(
        "import optax\n"
        "def clipped(lr=0.02): return optax.chain(optax.clip(1.0), optax.sgd(lr))\n"
        "def rateless(): return optax.sgd(0.1)\n"
        "def broken(lr): raise RuntimeError('this factory\\nis broken')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert make_optimizer("my_optimizers_here:clipped", None).learning_rate == 0.02
    assert make_optimizer("my_optimizers_here:clipped", 0.5).learning_rate == 0.5
    assert make_optimizer("my_optimizers_here:rateless", None).learning_rate is None
    with pytest.raises(ArgumentError, match="takes no learning rate"):
        make_optimizer("my_optimizers_here:rateless", 0.5)
    with pytest.raises(ArgumentError, match="Leave --schedule out"):
        make_optimizer("my_optimizers_here:rateless", None, cosine_steps=40)
    assert make_optimizer("my_optimizers_here:clipped", None, cosine_steps=40).learning_rate == 0.02
    with pytest.raises(ArgumentError, match="rprop takes no schedule"):
        make_optimizer("rprop", None, cosine_steps=40)
    with pytest.raises(ArgumentError, match=r"could not be created: RuntimeError: this factory\."):
        make_optimizer("my_optimizers_here:broken", 0.5)
