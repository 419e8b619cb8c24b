"""Sequence to sequence: LSTMs that add numbers, the loss masked behind the end of each answer."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

OPTIMIZER = optax.adam(1e-3, eps=1e-6)
CHARACTERS = "=+0123456789"
VOCABULARY, IN, OUT = len(CHARACTERS) + 1, 5, 4  # 0 ends a sequence and pads it


class Seq2seq(nn.Module):
    @nn.compact
    def __call__(self, inputs, targets):
        one_hot = lambda x: jax.nn.one_hot(x, VOCABULARY)
        carry, _ = nn.RNN(nn.LSTMCell(32), return_carry=True, name="encoder")(one_hot(inputs))
        shifted = jnp.pad(targets, ((0, 0), (1, 0)))[:, :-1]
        out = nn.RNN(nn.LSTMCell(32), name="decoder")(one_hot(shifted), initial_carry=carry)
        return nn.Dense(VOCABULARY)(out)


model = Seq2seq()


def loss_fn(params, batch):
    logits = model.apply({"params": params}, batch["query"], batch["answer"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["answer"])
    mask = (jnp.arange(OUT) <= batch["length"][:, None]).astype(jnp.float32)
    total, count = jnp.sum(losses * mask), jnp.sum(mask)
    return total / count


def data(steps):
    rng = np.random.default_rng(0)
    number = {c: i + 1 for i, c in enumerate(CHARACTERS)}
    encode = lambda text, size: [number[c] for c in text] + [0] * (size - len(text))
    for _ in range(steps):
        pairs = rng.integers(60, size=(16, 2))
        answers = [f"={a + b}" for a, b in pairs]
        yield {
            "query": np.array([encode(f"{a}+{b}", IN) for a, b in pairs]),
            "answer": np.array([encode(answer, OUT) for answer in answers]),
            "length": np.array([min(len(answer), OUT - 1) for answer in answers]),
        }


def main(optimizer=OPTIMIZER, steps=3):
    first = next(data(1))
    params = model.init(jax.random.key(0), first["query"], first["answer"])["params"]
    opt_state = optimizer.init(params)

    @jax.jit
    def train_step(params, opt_state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    for batch in data(steps):
        params, opt_state, loss = train_step(params, opt_state, batch)
        print(f"loss {loss:.4f}")
    return params


if __name__ == "__main__":
    main()
