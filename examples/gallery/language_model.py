"""A language model with sharded parameters: a device has an eighth, and gathers layer by layer."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import crossshard

crossshard.cpu_devices(8)  # virtual devices for a laptop

OPTIMIZER = optax.adamw(3e-3)
LAYERS, WIDTH, HEADS, CONTEXT, ROWS = 4, 128, 4, 32, 32
SYMBOLS = "\n .adefghinorstuvwxz"
DIGITS = "zero one two three four five six seven eight nine".split()
WAYS = ("weight_update", "replicated"), ("weight_update", "sharded"), ("params", "sharded")
loss_fn = lambda params, symbols: losses(params, symbols).mean()
normed = lambda x: x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)


def text():
    """Ten thousand sums, spelled out, as numbers of symbols; the last tenth is held out."""
    spell = lambda n: " ".join(DIGITS[int(digit)] for digit in str(n))
    pairs = np.random.default_rng(0).permutation([divmod(n, 100) for n in range(10_000)])
    sums = (f"{spell(a)} and {spell(b)} is {spell(a + b)}.\n" for a, b in pairs.tolist())
    symbols = np.array([SYMBOLS.index(symbol) for symbol in "".join(sums)])
    return np.split(symbols, [len(symbols) * 9 // 10])


def rows(symbols, number, seed):
    """Pieces of the text, [number, CONTEXT + 1]."""
    start = np.random.default_rng(seed).integers(0, len(symbols) - CONTEXT, size=(number, 1))
    return symbols[start + np.arange(CONTEXT + 1)]


def initial_params():
    """Stacked layers: the first axis is their number, as a `lax.scan` takes them."""
    keys = iter(jax.random.split(jax.random.key(0), 6))
    draw = lambda *shape: jax.random.normal(next(keys), shape) / shape[-2] ** 0.5
    layers = {"qkv": draw(LAYERS, WIDTH, 3 * WIDTH), "out": draw(LAYERS, WIDTH, WIDTH)}
    layers |= {"up": draw(LAYERS, WIDTH, 4 * WIDTH), "down": draw(LAYERS, 4 * WIDTH, WIDTH)}
    return {"symbols": draw(WIDTH, len(SYMBOLS)), "places": draw(CONTEXT, WIDTH), "layers": layers}


@jax.checkpoint
def block(x, layer):
    """One layer; the backward pass gathers it, and computes it, again."""
    heads = (normed(x) @ layer["qkv"]).reshape(*x.shape[:2], 3 * HEADS, -1)
    seen = jax.nn.dot_product_attention(*jnp.split(heads, 3, axis=2), is_causal=True)
    x = x + seen.reshape(x.shape) @ layer["out"]
    return x + jax.nn.gelu(normed(x) @ layer["up"]) @ layer["down"], None


def losses(params, symbols):
    """The mean cross-entropy of the next symbol, for each row."""
    x = params["symbols"].T[symbols[:, :-1]] + params["places"]
    x, _ = jax.lax.scan(block, x, params["layers"])
    logits = normed(x) @ params["symbols"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, symbols[:, 1:]).mean(1)


def train(step, steps, training, held_out):
    """The parameters, and the held-out loss after each tenth step and at the end."""
    state, curve = step.init(initial_params()), []
    for number in range(steps):
        state, _ = step(state, rows(training, ROWS, seed=number))
        if (number + 1) % 10 == 0 or number + 1 == steps:
            curve.append((number + 1, float(step.evaluate(state, [held_out], losses))))
    return jax.device_get(step.model(state)), curve


def main(optimizer=OPTIMIZER, steps=60, picture=None):
    """Say what a device holds and sends in three ways, train in the last one, and compare."""
    training, held_out = text()
    held_out = rows(held_out, 128, seed=0)
    print("a device of 8 has and sends  parameters  optimizer state  sent per step  at least")
    for option, value in WAYS:
        step = crossshard.make_train_step(loss_fn, optimizer, num_shards=8, **{option: value})
        state = step.init(initial_params())
        sent = crossshard.inspect(step.lower(state, rows(training, ROWS, 0)))
        held = lambda tree: sum(x.addressable_data(0).nbytes for x in jax.tree.leaves(tree))
        sizes = held(state.params), held(state.opt_state), sent.bytes_sent
        cells = [f"{size / 1e6:.2f} MB" for size in (*sizes, sent.lower_bound)]
        print("{:27}  {:10}  {:15}  {:13}  {}".format(f"{option}={value!r}", *cells))
        # With sharded parameters the backward pass gathers the layers again.
        assert sent.ratio < (1.5 if option == "params" else 1.01)
    _, curve = train(step, steps, training, held_out)  # with sharded parameters
    print(
        "\nstep  held-out loss", *(f"{step:4}  {loss:.3f}" for step, loss in curve), sep="\n"
    )  # Plain SGD, since Adam would hide a gradient of a wrong scale.
    few = []
    for way in ({"num_shards": 8, "params": "sharded"}, {"num_shards": 1}):
        step = crossshard.make_train_step(loss_fn, optax.sgd(0.1), **way)
        few.append(jax.tree.leaves(train(step, 3, training, held_out)[0]))
    for found, wanted in zip(*few, strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-5)
    print("after 3 steps of SGD the parameters are those of one device")
    if picture:
        from _picture import lines

        lines(picture, ("step", "held-out loss (nats per symbol)"), {"params sharded": curve})


if __name__ == "__main__":
    main()
