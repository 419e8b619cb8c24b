"""A plan for a pod: which TPU slice has room for a model of 6.6 billion parameters."""

import argparse

import jax
import jax.numpy as jnp
import optax

import crossshard

CONTEXT, HEAD = 2048, 128
PODS = ("v5e:2x4", "v5e:4x4", "v6e:2x4")


def types(layers=32, width=4096, words=32000):
    """The types of the parameters: nothing is allocated."""
    of = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    shapes = {"qkv": (width, 3 * width), "out": (width, width)}
    shapes |= {"up": (width, 4 * width), "down": (4 * width, width)}
    layers = {name: of(layers, *shape) for name, shape in shapes.items()}
    return {"words": of(words, width), "layers": layers}


def normed(x):
    """Without a scale, computed in 32 bits."""
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6)).astype(x.dtype)


@jax.checkpoint
def block(x, layer):
    """One layer, in bfloat16."""
    layer = jax.tree.map(lambda w: w.astype(x.dtype), layer)
    heads = (normed(x) @ layer["qkv"]).reshape(*x.shape[:2], -1, HEAD)
    seen = jax.nn.dot_product_attention(*jnp.split(heads, 3, axis=2), is_causal=True)
    x = x + seen.reshape(x.shape) @ layer["out"]
    return x + jax.nn.gelu(normed(x) @ layer["up"]) @ layer["down"], None


def loss_fn(params, tokens):
    """The mean cross-entropy of the next token."""
    words = params["words"].astype(jnp.bfloat16)
    x, _ = jax.lax.scan(block, words[tokens[:, :-1]], params["layers"])
    logits = (normed(x) @ words.T).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def plan(pod, context=CONTEXT, **sizes):
    """One row of tokens for each device."""
    return crossshard.plan(
        loss_fn,
        types(**sizes),
        lambda devices: jax.ShapeDtypeStruct((devices, context + 1), jnp.int32),
        optax.adamw(1e-4),
        topology=pod,
    )


def main(pods=PODS, context=CONTEXT, **sizes):
    """A line for each pod and way to keep the parameters; returns the plans."""
    line = "{:8}  {:17}  {:>11}  {:>9}  {:4}  {:>8}"
    print(line.format("pod", "step", "needed", "available", "fits", "sent"))
    plans = []
    for pod in pods:
        plans.append(found := plan(pod, context, **sizes))
        for each in found.candidates:
            sharded = "params sharded" if each.params == "sharded" else "update sharded"
            rest = "replicated" if each.weight_update == "replicated" else sharded
            needed = f"{each.memory.needed / 1e9:.1f} GB"
            row = [found.topology, rest, needed if each.compiled else f"> {needed}"]
            row += [f"{each.memory.available / 1e9:.1f} GB", "yes" if each.fits else "no"]
            row += [f"{each.links.sent / 1e9:.1f} GB" if each.links else ""]
            print(line.format(*row).rstrip())
    return plans


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pods", nargs="*", default=PODS, help="such as v5e:4x4, h100:4x8, cpu:8")
    arguments = parser.parse_args()
    try:
        main(arguments.pods)
    except crossshard.errors.ArgumentError as error:
        raise SystemExit(f"{error}") from None  # which compiler to install
