"""Prints the table of losses: ``python -m tests.losses [--only NAME] [--dtype float32] …``."""

import argparse
import collections
import os
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # a sharding of callbacks that XLA regrets
import tests.conftest  # noqa: F401  # sets up the CPU devices, before JAX is imported
from tests.losses import table
from tests.losses.cases import DTYPES, SHARDS, run

KINDS = ("mean", "ratio", "comparing", "wrong weight")


def main() -> int:
    """Runs the cases that are asked for; 1 if one is not as expected."""
    parser = argparse.ArgumentParser(prog="python -m tests.losses", description=__doc__)
    parser.add_argument("--only", default="", help="a part of the names")
    parser.add_argument("--kind", choices=KINDS, action="append")
    parser.add_argument("--dtype", choices=DTYPES, action="append")
    parser.add_argument("--shards", type=int, choices=SHARDS, action="append")
    given = parser.parse_args()
    dtypes, shards, kinds = given.dtype or DTYPES, given.shards or SHARDS, given.kind or KINDS
    counts: dict[str, collections.Counter[tuple[str, str]]] = {}
    unlike: dict[str, dict[str, list[str]]] = {}
    refusals, started = {}, time.monotonic()
    chosen = [c for c in table.CASES.values() if given.only in c.name and c.kind in kinds]
    for case in chosen:
        for form in case.forms:
            words, worst = [], {}
            name = case.name + f" ({form})" * (form != "plain")
            for dtype in dtypes:
                found = {number: run(case, form, dtype, number) for number in shards}
                for number, each in found.items():
                    key = dtype, each.outcome
                    counts.setdefault(case.kind, collections.Counter())[key] += 1
                    if not case.is_as_expected(form, dtype, each.outcome):
                        runs = unlike.setdefault(f"{case.kind}: {name}: {each.outcome}", {})
                        runs.setdefault(dtype, []).append(str(number))
                    if each.message:
                        refusals.setdefault((case.kind, name), each)
                outcomes = [each.outcome for each in found.values()]
                words.append(outcomes[0] if len({*outcomes}) == 1 else "/".join(outcomes))
                worst[dtype] = max(
                    (r.error for r in found.values() if r.error == r.error), default=None
                )
            errors = "  ".join("       " if e is None else f"{e:7.1e}" for e in worst.values())
            print(f"{case.kind:12}  {name:62}  {errors}  {', '.join(words)}", flush=True)
    print("\nRefused, or broken:")
    for (kind, name), each in refusals.items():
        print(f"  {kind}: {name}: {each.outcome}: {table.first_sentence(each.message)}")
    print("\nNot as expected, on so many shards:" if unlike else "\nAll as expected.")
    for name, runs in unlike.items():
        print(f"  {name}:", "; ".join(f"{dtype} {', '.join(n)}" for dtype, n in runs.items()))
    print(f"\n{'kind':12}  {'cases':>5}  dtype", *(f"{w:>8}" for w in table.OUTCOMES))
    for kind, counted in counts.items():
        cases = sum(c.kind == kind for c in chosen)
        for dtype in dtypes:
            row = (f"{counted[dtype, word]:8}" for word in table.OUTCOMES)
            print(f"{kind:12}  {cases:5}  {dtype:8}", *row)
    print(f"{time.monotonic() - started:.0f} s")
    return bool(unlike)


if __name__ == "__main__":
    sys.exit(main())
