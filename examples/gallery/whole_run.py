"""A training run from end to end: a transformer reads the sources of Python's standard library."""

import argparse
import gzip
import hashlib
import json
import sysconfig
from pathlib import Path

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import crossshard
from crossshard.tools import Meter

crossshard.cpu_devices(8)  # virtual devices for a laptop; on GPUs and TPUs this changes nothing

LAYERS, WIDTH, HEADS, CONTEXT, DROPOUT = 2, 128, 4, 64, 0.05
# The run. After each `EVERY` steps it is evaluated, logged and saved. It ends when `PATIENCE`
# evaluations in a row were not better than the best.
STEPS, ROWS, RATE, EVERY, PATIENCE, HELD_OUT = 300, 32, 4e-3, 50, 3, 32 * 1024
DAMAGED = 20  # a fault to be found: in row 5 of this batch a number is NaN


def text():
    """The bytes to train on, and those held out: sources that every machine with Python has."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    names = [p.relative_to(folder).as_posix() for p in folder.rglob("*.py")]
    names = [name for name in names if not {"test", "site-packages"} & set(name.split("/"))]
    # In the order of a hash, so that what is held out is a mixture, and the same in each run.
    names.sort(key=lambda name: hashlib.sha256(name.encode()).digest())
    whole = np.frombuffer(b"".join((folder / name).read_bytes() for name in names), np.uint8)
    return whole[:-HELD_OUT], whole[-HELD_OUT:]


def rows(text):
    """The text in rows of `CONTEXT` bytes: what is read, what is to be said, and what counts."""
    short = -len(text) % CONTEXT  # the last row is filled up, and what fills it does not count
    filled = np.pad(text, (1, short), constant_values=ord("\n"))
    counts = np.pad(np.ones(len(text), np.float32), (0, short))
    columns = {"read": filled[:-1], "wanted": filled[1:], "counts": counts}
    return {name: column.reshape(-1, CONTEXT) for name, column in columns.items()}


def batches(training):
    """Batches without end, each epoch in an order of its own; Grain knows where it stands."""
    order = grain.MapDataset.range(len(training["read"])).seed(0).shuffle()
    training["counts"][order[DAMAGED * ROWS + 5], 7] = np.nan  # this is the fault
    row = order.repeat().map(lambda number: {name: x[number] for name, x in training.items()})
    return iter(row.batch(ROWS).to_iter_dataset())


class Block(nnx.Module):
    """One layer: attention to the bytes before, then two dense layers, each added to its input."""

    def __init__(self, rngs):
        self.norms = nnx.List([nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(2)])
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)
        self.drop = nnx.Dropout(DROPOUT, rngs=rngs)

    def __call__(self, x, mask):
        x = x + self.drop(self.attention(self.norms[0](x), mask=mask))
        return x + self.drop(self.down(nnx.gelu(self.up(self.norms[1](x)))))


class Transformer(nnx.Module):
    """The logits of the byte after each byte, [rows, CONTEXT, 256]."""

    def __init__(self, rngs):
        self.bytes = nnx.Embed(256, WIDTH, rngs=rngs)
        # Tells the bytes just before from those further back, which attention alone does not.
        self.near = nnx.Conv(WIDTH, WIDTH, 4, padding="CAUSAL", rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, 256, use_bias=False, rngs=rngs)

    def __call__(self, read):
        x = self.bytes(read.astype(jnp.int32))
        x = x + self.near(x)
        for block in self.blocks:
            x = block(x, nnx.make_causal_mask(read))
        return self.head(self.norm(x))


def costs(model, batch, training=False):
    """The loss of each byte, in nats, and whether it counts; both [rows, CONTEXT]."""
    model.set_attributes(deterministic=not training)  # dropout is for training alone
    wanted = batch["wanted"].astype(jnp.int32)
    nats = optax.softmax_cross_entropy_with_integer_labels(model(batch["read"]), wanted)
    return {"nats": nats * batch["counts"], "bytes": batch["counts"]}


def loss_fn(model, batch):
    """A sum and its count, which the step divides once, over all shards."""
    found = costs(model, batch, training=True)
    return crossshard.Mean(found["nats"].sum(), found["bytes"].sum(), "bytes")


def optimizer(steps):
    """AdamW: clipped, warmed up, then on a cosine to zero; matrices alone decay."""
    rate = optax.warmup_cosine_decay_schedule(0, RATE, warmup_steps=steps // 10, decay_steps=steps)
    of_matrices = lambda params: jax.tree.map(lambda x: x.ndim > 1, params)
    adamw = optax.adamw(rate, b2=0.95, weight_decay=0.1, mask=of_matrices)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)


def bits_per_byte(step, state, held_out):
    """How many bits a byte of the held-out text takes, if the model's guesses compress it."""
    starts = range(0, len(held_out["read"]), ROWS)
    some = ({name: x[at : at + ROWS] for name, x in held_out.items()} for at in starts)
    mean = step.evaluate(state, some, costs)
    return float(mean["nats"].sum() / mean["bytes"].sum()) / np.log(2)


def train(folder, steps, training, held_out):
    """Train on all devices, or go on with the run in this folder; return step and best state."""
    step = crossshard.make_train_step(
        loss_fn, optimizer(steps), metrics=("grad_norm",), nonfinite="skip"
    )
    model = Transformer(nnx.Rngs(0))
    ahead = step.prefetch(batches(training), 2)  # read while a step runs
    meter = Meter(step, tokens_per_row=CONTEXT)
    with (
        crossshard.Checkpoints(folder / "checkpoints", step, keep=1, keep_best=1) as checkpoints,
        (folder / "metrics.jsonl").open("a") as log,
    ):
        found = checkpoints.restore_latest(step.abstract_init(model))
        start = {"batches": ahead.get_state(), "best": [np.inf, 0]}
        state, data = found or (step.init(model), start)
        ahead.set_state(data["batches"])
        number, best = int(state.step), data["best"]
        print(f"{'goes on from' if found else 'begins at'} step {number}", flush=True)
        while number < steps and number - best[1] < PATIENCE * EVERY:
            batch = next(ahead)
            state, metrics = step(state, batch)
            meter.update(batch, metrics)
            if metrics["skipped"]:  # nothing of the state has changed, and the step does not count
                with meter.paused():
                    print(step.find_nonfinite(state, batch), flush=True)
                continue
            number += 1
            if number % EVERY and number < steps:
                continue
            with meter.paused():
                bits = bits_per_byte(step, state, held_out)
                best = min(best, [bits, number])
                # Where the iterator stands and what was best, for the run to go on with.
                data = {"batches": ahead, "best": best}
                checkpoints.save(state, data, score=-bits)
            seen = {"step": number} | {name: float(metrics[name]) for name in ("loss", "grad_norm")}
            seen |= {"held_out": bits, **meter.report()}
            # What is done again after a kill is logged again: of each step the last line counts.
            print(json.dumps(seen), file=log, flush=True)
            print("  ".join(f"{k} {round(v, 2)}" for k, v in seen.items()), flush=True)
        state, _, number, score = checkpoints.restore_best(step.abstract_init(model))
        print(f"the best is step {number}: {-score:.2f} bits per byte of held-out text")
    return step, state


def write(model, prompt, length, temperature=0.7):
    """What the model writes after the prompt, byte by byte."""
    model.eval()
    logits = nnx.jit(lambda model, read: model(read)[0, -1])
    window, rng = list(prompt[-CONTEXT:]), np.random.default_rng(0)
    for _ in range(length):
        chances = np.exp(np.asarray(logits(model, jnp.array([window[-CONTEXT:]]))) / temperature)
        window.append(int(rng.choice(256, p=chances / chances.sum())))
    return bytes(window[-length:]).decode(errors="replace")


def main(folder=Path("runs/whole_run"), steps=STEPS, picture=None):
    """Train, compare with gzip, and show what the model writes."""
    folder.mkdir(parents=True, exist_ok=True)
    training, held_out = text()
    step, state = train(folder, steps, rows(training), rows(held_out))
    zipped = 8 * len(gzip.compress(held_out.tobytes(), 9)) / len(held_out)
    print(f"gzip -9 takes {zipped:.2f} for the same text")
    model = jax.device_get(step.model(state))  # to write, one device is enough
    print("the model writes:", write(model, held_out, 300), sep="\n")
    if picture:
        from _picture import lines

        logged = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        curve = {each["step"]: each["held_out"] for each in logged}
        curves = {"the model": curve.items(), "gzip -9": [(x, zipped) for x in curve]}
        lines(picture, ("step", "held-out bits per byte"), curves, behind=["gzip -9"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default="runs/whole_run", help="to write to")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--picture", metavar="PATH", help="draw the curve to this file")
    main(**vars(parser.parse_args()))
