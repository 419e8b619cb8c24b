"""Kills a run at random moments, again and again, and checks what it leaves as its user would."""

import collections
import contextlib
import os
import re
import signal
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from crossshard.distributed import PROCESS_LOST
from crossshard.distributed.job import listen
from tests.examples.byte_lm.small import COMMAND, LAUNCH, SMALL, bare_environment, small_text
from tests.examples.byte_lm.test_processes import started_by

SAVE_EVERY = 3
# A multiple of every number of shards here.
WORDS = [*SMALL, "--batch", "12", "--learning-rate", "1e-3"]
ENDLESS = 1_000_000
# Until it counts as a hang; a start is ten seconds, unless many others start, too.
PATIENCE = 900
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
MOMENTS = ("the start", "a step", "a save")


class Run:
    """The command in several processes.

    Args:
      folder: where text, output and log are.
      out: the name of the output folder.
      processes: how many.
      devices: virtual devices of each.
      words: further words of the command.
      launched: under ``crossshard launch``, or each by itself, with nobody who ends the others.
    """

    def __init__(
        self, folder: Path, out: str, processes: int, devices: int, *words: str, launched: bool
    ) -> None:
        data = str(small_text(folder))
        command = [*COMMAND, "--data", data, "--out", out, *WORDS, *words]
        self.launched, self.began = launched, time.time()
        self._folder, self._logs = folder, []
        if launched:
            launch = [*LAUNCH, "-n", str(processes), "--cpu-devices", str(devices), "--"]
            self.started = [self._start([*launch, *command], {})]
            return
        of_all = {
            "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{listen('127.0.0.1', 0)}",
            "JAX_NUM_PROCESSES": str(processes),
            "JAX_NUM_CPU_DEVICES": str(devices),
            "PYTHONUNBUFFERED": "1",
        }
        own = [{**of_all, "JAX_PROCESS_ID": str(each)} for each in range(processes)]
        self.started = [self._start(command, more) for more in own]

    def _start(self, command: list[str], more: dict[str, str]) -> subprocess.Popen[bytes]:
        self._logs.append(self._folder / f"log-{len(self._logs)}")
        with self._logs[-1].open("wb") as log:
            environment = {**bare_environment(), **more}
            return subprocess.Popen(
                command, cwd=self._folder, env=environment, stdout=log, stderr=subprocess.STDOUT
            )

    def workers(self) -> list[int]:
        """The process ids of those that train, process 0 first."""
        if not self.launched:
            return [each.pid for each in self.started]
        return started_by(self.started[0].pid)

    def printed(self) -> str:
        """All that they have printed."""
        return "".join(log.read_text(errors="replace") for log in self._logs)

    def is_running(self) -> bool:
        """Whether none has ended."""
        return all(each.poll() is None for each in self.started)

    def wait(self) -> list[float]:
        """Until all have ended; when each did. That one does not is a hang."""
        ended: dict[int, float] = {}
        until = time.monotonic() + PATIENCE
        while len(ended) < len(self.started):
            for own, process in enumerate(self.started):
                if own not in ended and process.poll() is not None:
                    ended[own] = time.monotonic()
            assert time.monotonic() < until, f"It hangs.\n{self.printed()}"
            time.sleep(0.02)
        return [ended[own] for own in range(len(self.started))]

    def kill(self) -> None:
        """End what is left."""
        for process in self.started:
            process.kill()
            process.wait()


class Chaos:
    """A run that is stopped in random ways and resumed, until ``finish`` lets it end.

    Args:
      folder: an empty folder.
      seed: of what is drawn.
      tell: called with a line for each cycle.

    Attributes:
      out: the output folder.
      seconds: from a SIGKILL to the end of each of the others, ascending, by whether they were
        launched.
    """

    def __init__(self, folder: Path, seed: int, tell: Callable[[str], None]) -> None:
        self.out = folder / "out"
        self.seconds: dict[bool, list[float]] = {True: [], False: []}
        self._kills: collections.Counter[str] = collections.Counter()
        self._folder, self._tell = folder, tell
        self._rng = np.random.default_rng(seed)
        # The newest checkpoint that the run has said to be there, or that was seen.
        self._acknowledged = 0
        # Until the first step, as the last run that came so far has taken.
        self._starts = 5.0

    def cycle(self, processes: int, devices: int, *words: str) -> None:
        """Start or resume the run, send one of its processes a signal, and wait for all."""
        rng, before = self._rng, self._resumed_from()
        number = SIGNALS[rng.choice(3, p=(0.6, 0.2, 0.2))]
        moment = MOMENTS[rng.choice(3, p=(0.2, 0.3, 0.5))]
        # Where nobody ends the others, they wait minutes for one that has not come to connect.
        launched = moment == "the start" or bool(rng.random() < 0.5)
        run = self._start(processes, devices, *words, steps=ENDLESS, launched=launched)
        try:
            self._wait_for(moment, before, run)
            workers = run.workers()
            who = int(rng.integers(len(workers)))
            # What is complete now is so for ever.
            self._acknowledge(self._newest())
            killed = time.monotonic()
            os.kill(workers[who], number)
            ended = run.wait()
            assert not any(map(is_there, workers)), workers
        finally:
            run.kill()
        self._check_log(run.printed(), before, said=moment != "the start")
        self._check_codes(run, number, who, moment)
        seconds = [at - killed for own, at in enumerate(ended) if launched or own != who]
        if number == signal.SIGKILL:
            self.seconds[launched] = sorted([*self.seconds[launched], *seconds])
        left = ["that left a part of a checkpoint"] * any(x > run.began for x in self._unfinished())
        self._kills.update([number.name, f"at {moment}", f"to process {who}", *left])
        self._tell(
            f"{number.name:7} to process {who} of {processes} x {devices}, "
            f"{'launched' if launched else 'alone':8}  at {moment:9}  step {before} to "
            f"{self._newest()}  {max(seconds, default=0.0):.1f} s"
        )

    def finish(self, processes: int, devices: int, *words: str) -> int:
        """Resume it a last time and let it end; how many steps there are."""
        before = self._resumed_from()
        run = self._start(processes, devices, *words, steps=before + 2 * SAVE_EVERY, launched=True)
        try:
            run.wait()
        finally:
            run.kill()
        assert run.started[0].returncode == 0, run.printed()
        self._check_log(run.printed(), before, said=True)
        return before + 2 * SAVE_EVERY

    def summary(self) -> str:
        """How many of what there were."""
        kinds = ", ".join(f"{often} {what}" for what, often in sorted(self._kills.items()))
        lines = [f"kills: {kinds}", "nothing acknowledged lost, no checkpoint unreadable, no hang"]
        for launched, who in ((False, "the other processes"), (True, "the launcher and all")):
            if found := self.seconds[launched]:
                lines.append(
                    f"after SIGKILL {who} ended in {statistics.median(found):.1f} s (median of "
                    f"{len(found)}), all in {found[-1]:.1f}"
                )
        return "\n".join(lines)

    def _start(self, processes: int, devices: int, *words: str, steps: int, launched: bool) -> Run:
        saves = ["--save-every", str(SAVE_EVERY), "--steps", str(steps), "--resume"]
        return Run(self._folder, "out", processes, devices, *saves, *words, launched=launched)

    def _wait_for(self, moment: str, before: int, run: Run) -> None:
        rng = self._rng
        if moment == "the start":
            self._wait(run, lambda: len(run.workers()) > 0)
            time.sleep(rng.uniform(0, self._starts))
            return
        # The steps after the checkpoint are forgotten first.
        goes_on = lambda: not before or f"goes on after step {before}" in run.printed()
        self._wait(run, lambda: goes_on() and self._steps(since=run.began) > before)
        self._starts = time.time() - run.began
        if moment == "a save":
            self._wait(run, lambda: any(at > run.began for at in self._unfinished()))
        else:
            steps = self._steps() + rng.integers(2 * SAVE_EVERY)
            self._wait(run, lambda: self._steps() >= steps)
        time.sleep(rng.uniform(0, 0.2))

    def _wait(self, run: Run, comes: Callable[[], bool]) -> None:
        until = time.monotonic() + PATIENCE
        while not comes():
            assert run.is_running(), f"It ended by itself.\n{run.printed()}"
            assert time.monotonic() < until, f"It hangs.\n{run.printed()}"
            time.sleep(0.02)

    def _check_log(self, printed: str, before: int, *, said: bool) -> None:
        """That it has gone on from the newest checkpoint, and that what it has told of is there."""
        assert "CheckpointWarning" not in printed, printed
        found = re.findall(r"goes on after step (\d+)", printed)
        assert found == [str(before)] * bool(before) or not (said or found), printed
        for step in re.findall(r"Saved after step (\d+)", printed):
            self._acknowledge(int(step))
        assert self._newest() >= self._acknowledged, printed

    def _check_codes(self, run: Run, number: signal.Signals, who: int, moment: str) -> None:
        codes, printed = [each.returncode for each in run.started], run.printed()
        if number == signal.SIGKILL and run.launched:
            assert codes == [128 + number], printed
        elif number == signal.SIGKILL:
            others = codes[:who] + codes[who + 1 :]
            assert codes[who] == -number
            assert others == [PROCESS_LOST] * len(others), printed
            assert printed.count(f"crossshard: process {who} died. Process") == len(others)
        else:
            stopped = [0 if number == signal.SIGTERM else 128 + number] * len(codes)
            before_it_began = moment == "the start" and codes == [128 + number]
            assert codes == stopped or before_it_began, printed
            assert "Saved after step" in printed or moment == "the start", printed

    def _resumed_from(self) -> int:
        newest = self._newest()
        assert newest >= self._acknowledged
        return newest

    def _acknowledge(self, step: int) -> None:
        self._acknowledged = max(self._acknowledged, step)

    def _names(self) -> list[Path]:
        folder = self.out / "checkpoints"
        return list(folder.iterdir()) if folder.is_dir() else []

    def _newest(self) -> int:
        return max((int(path.name) for path in self._names() if path.name.isdigit()), default=0)

    def _unfinished(self) -> list[float]:
        """When each folder was made in which a checkpoint is being written, or was."""
        found = []
        for path in self._names():
            with contextlib.suppress(FileNotFoundError):  # it is complete, or deleted
                found += [path.stat().st_mtime] * ("tmp" in path.name)
        return found

    def _steps(self, since: float = 0) -> int:
        metrics = self.out / "metrics.jsonl"
        if not metrics.exists() or metrics.stat().st_mtime < since:
            return 0
        return metrics.read_bytes().count(b"\n")


def is_there(pid: int) -> bool:
    """Whether a process of this number still trains."""
    try:
        return b"examples.byte_lm" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
