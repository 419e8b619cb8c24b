"""Prints the table of losses: ``python -m tests.losses [--only NAME] [--dtype float32] …``."""

import argparse
import collections
import os
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # a sharding of callbacks that XLA regrets
import tests.conftest  # noqa: F401  # sets up the CPU devices, before JAX is imported
from tests.losses.cases import DTYPES, SHARDS, run
from tests.losses.table import CASES

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
    counts, unlike, refusals = collections.Counter[tuple[str, ...]](), list[str](), dict[str, str]()
    started = time.monotonic()
    for case in (c for c in CASES.values() if given.only in c.name and c.kind in kinds):
        for form in case.forms:
            words, errors = [], []
            name = case.name + f" ({form})" * (form != "plain")
            for dtype in dtypes:
                found = [run(case, form, dtype, number) for number in shards]
                for number, each in zip(shards, found, strict=True):
                    counts[case.kind, dtype, each.outcome] += 1
                    if not case.is_as_expected(form, dtype, each.outcome):
                        unlike.append(f"  {case.kind}: {name}: {each.outcome}: {dtype} {number}")
                    if each.message:
                        sentence = each.message.partition("\n")[0].split(". ")[0]
                        refusals.setdefault(f"{case.kind}: {name}: {each.outcome}", sentence)
                words.append("/".join(dict.fromkeys(each.outcome for each in found)))
                worst = max((r.error for r in found if r.error == r.error), default=None)
                errors.append("       " if worst is None else f"{worst:7.1e}")
            print(f"{case.kind:12}  {name:62}  {'  '.join(errors)}  {', '.join(words)}", flush=True)
    print("\nRefused, or broken:", *(f"  {k}: {x}" for k, x in refusals.items()), sep="\n")
    print("\nNot as expected, on so many shards:" if unlike else "\nAll as expected.")
    print(*unlike, *(f"{' '.join(key)}: {n}" for key, n in counts.items()), sep="\n")
    print(f"{time.monotonic() - started:.0f} s")
    return bool(unlike)


if __name__ == "__main__":
    sys.exit(main())
