"""Shows what was changed in a program, and runs it on one device and on eight shards.

``python -m examples.programs`` lists the programs, ``python -m examples.programs ppo`` runs one.
"""

import sys

import crossshard
from examples.programs.catalogue import PROGRAMS, difference


def main(names: list[str]) -> None:
    """Run the programs of these names; without any, list all."""
    chosen = [each for each in PROGRAMS if each.name in names]
    if len(chosen) < max(1, len(names)):
        for each in PROGRAMS:
            print(f"{each.name:20} {each.what}")
        sys.exit(None if not names else f"There is no program called {' or '.join(names)}.")
    crossshard.cpu_devices(8)
    for each in chosen:
        print(each.diff())
        one, eight = (each.run(kind) for kind in ("before", "after"))
        print(f"one device and eight shards differ by {difference(eight, one):.1e}")


if __name__ == "__main__":
    main(sys.argv[1:])
