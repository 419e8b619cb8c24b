"""How long it takes from the death of a process to the next step, in parts.

`python -m benchmarks.restarts`: four processes of `examples.byte_lm` train under `crossshard
launch`, and one of them is killed again and again.
"""

import argparse
import contextlib
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks import age, markdown
from benchmarks.machine import this_machine

PROCESSES, EVERY = 4, 5
# How long a line may not come, in seconds.
PATIENCE = 300.0
# What ends each part: the lines of the new run, in their order.
PARTS = {
    "noticed, the others ended": r"crossshard: started again",
    "Python and the script started": r"\[0\] crossshard \d",
    "step traced, connected": r"\[0\] \[Gloo\]",
    "state restored": r"\[0\] .*is restored",
    "a step taken": r"trains again after",
}
# What a run has: its flags of `crossshard launch`, and of the example.
WAYS = {
    "checkpoints on disk": ([], ["--save-every", "50"]),
    "snapshots in memory": ([], ["--memory-every", str(EVERY)]),
    "and spare processes": (["--spares", str(PROCESSES)], ["--memory-every", str(EVERY)]),
}
_COLORS = ("#5b6b7d", "#8ecae6", "#ffd28a", "#95d5b2", "#e07a5f")


class Run:
    """A run whose lines are read as they come, with the seconds at which they came."""

    def __init__(
        self, words: Sequence[object], environment: dict[str, str] | None = None, restarts: int = 0
    ):
        launch = [sys.executable, "-m", "crossshard.tools.cli", "launch", "-n", PROCESSES]
        launch += ["--cpu-devices", 1, "--restarts", restarts, *words]
        self.process = subprocess.Popen(
            list(map(str, launch)),
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[tuple[float, str]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.monotonic(), line))

    def printed(self) -> str:
        """All lines so far."""
        return "".join(line for _, line in self.lines)

    def wait_for(self, pattern: str, since: int, seconds: float = PATIENCE) -> bool:
        """Wait for a line after some lines; return whether it came in time, and before the end."""
        until = time.monotonic() + seconds
        while not any(re.search(pattern, line) for _, line in self.lines[since:]):
            if self.process.poll() is not None or time.monotonic() > until:
                return False
            time.sleep(0.01)
        return True

    def parts(self, began: float, since: int) -> dict[str, float]:
        """The seconds of each part after a death, given the lines that came before it."""
        found = {}
        for part, pattern in PARTS.items():
            came = [at for at, line in self.lines[since:] if re.search(pattern, line)]
            if came:
                found[part], began = came[-1] - began, came[-1]
        return found

    def processes(self) -> list[int]:
        """The ids of the processes that run the example, of spare ones too."""
        found = []
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        # What has ended meanwhile, the launcher too, runs nothing.
        with contextlib.suppress(OSError):
            for pid in map(int, path.read_text().split()):
                with contextlib.suppress(OSError):
                    if b"examples.byte_lm" in Path(f"/proc/{pid}/cmdline").read_bytes():
                        found.append(pid)
        return found

    def end(self) -> None:
        """Kill the launcher, if it has not ended, with all that it has started."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def main() -> None:
    """Measure, and print or write a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=10, help="deaths of each kind of run")
    parser.add_argument("--out", type=Path, help="write a page, such as docs/benchmarks/x.md")
    options = parser.parse_args()
    machine = this_machine()
    rows, medians = [], dict[str, dict[str, float]]()
    for name, (flags, words) in WAYS.items():
        parts, lost = measured(options.kills, flags, words)
        medians[name] = {part: statistics.median(each[part] for each in parts) for part in PARTS}
        totals = [sum(each.values()) for each in parts]
        median, most = np.percentile(totals, [50, 95])
        cells = [f"{medians[name][part]:.1f}" for part in PARTS]
        rows.append([name, *cells, f"**{median:.1f}**", f"{most:.1f}", f"{np.median(lost):g}"])
        print(" | ".join(rows[-1]), flush=True)
    head = ("run with", *PARTS, "in all", "95%", "steps done again")
    table = markdown.table(head, rows)
    print(table)
    if options.out is not None:
        options.out.with_suffix(".svg").write_text(drawn(medians), encoding="utf-8")
        repeat = f"python -m benchmarks.restarts --kills {options.kills}"
        last = markdown.measured_on(machine, repeat)
        age.write(options.out, markdown.again("restarts", [table], last))


def measured(
    kills: int, flags: Sequence[str], words: Sequence[str]
) -> tuple[list[dict[str, float]], list[int]]:
    """The seconds of each part for each death, and how many steps were done again."""
    rng, found = np.random.default_rng(0), list[dict[str, float]]()
    with tempfile.TemporaryDirectory(dir="/dev/shm", ignore_cleanup_errors=True) as folder:
        example = [sys.executable, "-m", "examples.byte_lm", "--steps", 1_000_000, "--resume"]
        example += ["--out", f"{folder}/out", "--batch", 8, "--layers", 1, "--width", 32, *words]
        if "--memory-every" in words:
            example += ["--memory", f"{folder}/memory"]
        run = Run([*flags, "--", *example], restarts=kills)
        try:
            known = 0
            for _ in range(kills):
                # The first steps of the new run, and what spare processes import.
                assert run.wait_for(r"step +\d+/|trains again", known), run.printed()
                time.sleep(15 + rng.uniform(0, 1))
                known, began = len(run.lines), time.monotonic()
                os.kill(run.processes()[int(rng.integers(PROCESSES))], signal.SIGKILL)
                assert run.wait_for("trains again after", known), run.printed()
                found.append(run.parts(began, known))
        finally:
            run.end()
    lost = re.findall(r"trains again after .*: (\d+) steps? w", run.printed())
    return found, list(map(int, lost))


def drawn(medians: dict[str, dict[str, float]]) -> str:
    """A picture of the parts, as bars with a common scale."""
    most = max(sum(each.values()) for each in medians.values())
    scale, height = 620 / most, 60 + 46 * len(medians)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 860 {height}" width="860" '
        'role="img" font-family="sans-serif" font-size="14">',
        f'<rect width="860" height="{height}" fill="#ffffff"/>',
    ]
    for place, (name, parts) in enumerate(medians.items()):
        x, y = 200.0, 12 + 46 * place
        lines.append(f'<text x="190" y="{y + 21}" text-anchor="end" fill="#16202b">{name}</text>')
        for color, seconds in zip(_COLORS, parts.values(), strict=True):
            width = seconds * scale
            lines.append(
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="32" fill="{color}"/>'
            )
            x += width
    x = 12.0
    for color, part in zip(_COLORS, PARTS, strict=True):
        lines.append(f'<rect x="{x:g}" y="{height - 30}" width="14" height="14" fill="{color}"/>')
        lines.append(f'<text x="{x + 19:g}" y="{height - 18}" font-size="12">{part}</text>')
        x += 29 + 6.5 * len(part)
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    main()
