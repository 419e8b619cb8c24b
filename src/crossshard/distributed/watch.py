"""Watch: ends this process, with a word on why, when another one is gone or does not move.

Process 0 judges: it reads the reports of all, and the others read what it says. So each process
sends the coordinator a few texts in a second, however many there are.
"""

import atexit
import contextlib
import ctypes
import dataclasses
import os
import signal
import socket
import sys
import sysconfig
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from crossshard import _jax
from crossshard.distributed import identity
from crossshard.distributed.judge import (
    EARLY,
    PROCESS_STALLED,
    Judge,
    Kind,
    Report,
    State,
    Timeouts,
    Verdict,
    unheard,
)
from crossshard.distributed.progress import PROGRESS

_EVERY = 0.5
# For the others to read the verdict and to end, before process 0 takes the coordinator away: those
# of other machines, and those of its own, on a busy one.
_FAREWELL_SECONDS, _END_SECONDS = 1.5, 5.0
# For a coordinator that does not answer to answer again.
_ANSWER_SECONDS = 2.0
# For a process that stood still to find that the others have left.
_RECENT_SECONDS = 20.0
_FOLDER = "crossshard/watch"
# The file in which processes tell their launcher that they connect, and why they leave.
VERDICTS = "CROSSSHARD_VERDICTS"
# What they write there before they wait for each other to connect.
CONNECTS = "connects"
# Nobody gives it back: the first thread that leaves ends the process, and has the last word.
_LEAVING = threading.Lock()
_NOT_THE_USERS = tuple(
    {sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    | {str(Path(__file__).parents[1]), "<frozen"}
)
# Python calls its own handlers between two instructions only, and an abort does not wait for one.
_Handler = ctypes.CFUNCTYPE(None, ctypes.c_int)
_kept: list[Any] = []


def watch(number: int, own: int, address: str, timeouts: Timeouts) -> None:
    """Watch the other processes of a job, whose coordinator is connected, until this one ends."""
    PROGRESS.seconds = timeouts.of
    _Watch(number, own, address, timeouts).start()


def watch_alone(seconds: float) -> None:
    """End this process, which is the only one of its job, if it enters nothing for so long.

    Its time counts from the end of a call on: to compile a step may take as long as it does.
    """

    def tick() -> None:
        calls, idle = 0, 0.0
        while True:
            time.sleep(_EVERY)
            now = PROGRESS.now
            is_early = now.latest.partition(" ")[0] in EARLY
            moves = is_early or PROGRESS.inside or now.calls != calls
            calls, idle = now.calls, 0.0 if moves else idle + _EVERY
            if idle >= seconds:
                what = f"nothing was entered for {int(idle)} seconds after {now.latest}."
                _leave(0, Verdict(Kind.STALLED, 0, f"{what} It stands at {_place()}."))

    PROGRESS.is_alone = True
    _start(tick)


def _start(target: Any) -> None:
    threading.Thread(target=target, name="crossshard watch", daemon=True).start()


class _Watch:
    def __init__(self, number: int, own: int, address: str, timeouts: Timeouts) -> None:
        self._number = number
        self._process = own
        self._address = address
        self._timeouts = timeouts
        self._beat = 0
        # Seconds in which this process ran; those of a suspended machine are nobody's fault.
        self._clock = 0.0
        self._answered = 0.0
        self._failing_since: float | None = None
        self._judge = Judge(number, timeouts, self._clock)
        self._first = Judge(1, timeouts, self._clock)  # in the eyes of the others
        self._machine = identity.machine()
        self._verdict: Verdict | None = None
        self._stacks: str | None = None
        # For how many seconds this process stood still last, and when that ended.
        self._stood = (0.0, 0.0)
        self._released = threading.Event()
        self._over = False

    def start(self) -> None:
        _jax.kv_set(f"{_FOLDER}/{self._machine}/{self._process}", identity.own_identity())
        # JAX's runtime ends a process whose coordinator is gone; this says a word before it.
        _kept.append(_Handler(self._speak_before_abort))
        _on_abort(ctypes.cast(_kept[0], ctypes.c_void_p))
        atexit.register(self._at_exit)
        # In a thread of its own, since a call does not return if the coordinator stands still.
        _start(self._talk)
        _start(self._tick)

    def _talk(self) -> None:
        while not self._over:
            try:
                self._exchange()
                self._answered, self._failing_since = self._clock, None
            except Exception as error:  # whatever the runtime raises
                if not _jax.has_coordinator():
                    # The script has called jax.distributed.shutdown().
                    self._over = True
                    self._released.set()
                elif self._failing_since is None and "UNAVAILABLE" in str(error):
                    self._failing_since = self._clock
            time.sleep(_EVERY)

    def _exchange(self) -> None:
        report = self._report()
        if self._process == 0:
            self._tell("first/report", report)
            told = {process: Report.parse(text) for process, text in self._told("reports").items()}
            verdict = self._judge.hear({**told, 0: report}, self._clock)
        else:
            self._tell(f"reports/{self._process}", report)
            verdict = self._of_first()
        if verdict is not None:
            self._obey(verdict)

    def _tell(self, key: str, what: Report | Verdict) -> None:
        _jax.kv_overwrite(f"{_FOLDER}/{key}", str(what))

    def _of_first(self) -> Verdict | None:
        texts = _jax.kv_get_dir(f"{_FOLDER}/first/")
        told = Verdict.parse(texts.get("verdict", ""))
        report = Report.parse(texts.get("report", ""))
        if told is not None or report is None:
            return told
        verdict = self._first.hear({0: report}, self._clock)
        # That process 0 has come to its end says nothing of the others.
        return verdict if verdict and verdict.kind is not Kind.DONE else None

    def _report(self) -> Report:
        self._beat += 1
        of_machine = self._told(self._machine)
        of_machine.pop(self._process, None)
        gone = (process for process, told in of_machine.items() if identity.is_gone(told))
        now = PROGRESS.now
        # Before the first call JAX itself waits for all, to count their devices.
        waits = now.waits if now.calls else int(_jax.backend_has_begun())
        return dataclasses.replace(
            now, beat=self._beat, gone=next(gone, None), place=_place(), waits=waits
        )

    def _told(self, below: str) -> dict[int, str]:
        """What each process has told, by its number; whatever else is there is left out."""
        found = _jax.kv_get_dir(f"{_FOLDER}/{below}/")
        numbers = {str(process) for process in range(self._number)}
        return {int(key): text for key, text in found.items() if key in numbers}

    def _tick(self) -> None:
        while not self._over:
            began = time.monotonic()
            time.sleep(_EVERY / 2)
            self._clock += _EVERY / 2
            stood = time.monotonic() - began
            # The others count from the last time that they heard of this process.
            if stood >= self._timeouts.silence(PROGRESS.now.latest) / 2:
                self._stood = (stood, self._clock)
            silent = self._clock - self._answered
            failing = self._failing_since
            if failing is not None and self._clock - failing > _ANSWER_SECONDS:
                self._leave(Verdict.of(Kind.DIED, 0, "died"))
            elif silent >= self._timeouts.silence(PROGRESS.now.latest) and self._process != 0:
                self._leave(unheard(0, silent))

    # The end.

    def _obey(self, verdict: Verdict) -> None:
        self._verdict = verdict
        # Before the others leave, which the main thread may meet.
        self._stacks = _stacks()
        own_end = PROGRESS.now.state is not State.RUNNING and verdict.process == self._process
        if self._process == 0:
            self._tell("first/verdict", verdict)
            with contextlib.suppress(Exception):
                self._wait_for_others(verdict)
        self._over = True
        if verdict.kind is Kind.DONE or own_end:
            self._released.set()
        else:
            self._leave(verdict)

    def _wait_for_others(self, verdict: Verdict) -> None:
        """Let the others leave, each with its own code, which it loses if this one is gone."""
        if verdict.kind is Kind.DONE:
            return
        began, told = time.monotonic(), self._told(self._machine)
        least = _FAREWELL_SECONDS if len(told) < self._number else 0
        silent = verdict.process if verdict.kind is Kind.SILENT else 0
        others = [each for process, each in told.items() if process not in (0, silent)]
        while (seconds := time.monotonic() - began) < _END_SECONDS:
            if seconds >= least and all(map(identity.is_gone, others)):
                break
            time.sleep(0.05)

    def _leave(self, verdict: Verdict) -> None:
        if verdict.kind is Kind.DIED:
            # Until the clock has been read.
            time.sleep(_EVERY)
            seconds, end = self._stood
            if seconds and self._clock - end < _RECENT_SECONDS:
                # This process stood still: the others have left for that, and have not died.
                verdict = unheard(self._process, seconds)
        _leave(self._process, verdict, self._stacks)

    def _speak_before_abort(self, _: int) -> None:
        if PROGRESS.now.state is State.FAILED and self._released.is_set():
            os._exit(1)
        if self._verdict is None and answers(self._address):
            return  # it aborts for a reason of its own
        self._leave(self._verdict or Verdict.of(Kind.DIED, 0, "died"))

    def _at_exit(self) -> None:
        """Wait for the others, which may need this process; keep its exit code."""
        was_over = self._over
        # Python has printed an exception that nobody caught.
        failed: Any = getattr(sys, "last_type", None)
        if not was_over:
            error = "" if failed is None else failed.__name__[:60]
            PROGRESS.note(state=State.LEFT if failed is None else State.FAILED, error=error)
        # If it is over, another thread may be about to say why this process leaves.
        with contextlib.suppress(KeyboardInterrupt):
            self._released.wait()
        if was_over or (self._verdict is not None and self._verdict.kind is Kind.DONE):
            return
        # JAX would now wait for the others, some of which wait for this one.
        if failed is None:
            # As usual: Python ends, and runs no more functions. If the coordinator goes before, the
            # abort waits in C for as many seconds as the number of its signal, which is 6.
            _on_abort(ctypes.cast(ctypes.CDLL(None).sleep, ctypes.c_void_p))
            _jax.abandon_coordination()
            return
        _flush()
        if issubclass(failed, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        os._exit(1)


def _leave(process: int, verdict: Verdict, stood: str | None = None) -> None:
    """End this process, with a word on why, and if one stands still, on where this one stood."""
    _LEAVING.acquire()
    # The main thread may hold the lock of a stream.
    flushing = threading.Thread(target=_flush, daemon=True)
    flushing.start()
    flushing.join(0.5)
    line = f"crossshard: {verdict.sentence} Process {process} leaves."
    if verdict.code == PROCESS_STALLED:
        # The main thread may have printed a part of a line.
        line = f"\n{stood or _stacks()}\n{line}"
    error = 2
    # The main thread may be printing what it met since the others left: the word comes last.
    with contextlib.suppress(OSError):
        error = os.dup(2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    with contextlib.suppress(OSError):
        os.write(error, f"{line}\n".encode())
    # Exit codes alone would not tell who left because of whom.
    tell_launcher(process, str(verdict))
    os._exit(verdict.code)


def tell_launcher(process: int, what: str) -> None:
    """Write a line for ``crossshard launch``, if that has started this process."""
    with contextlib.suppress(KeyError, OSError):
        file = os.open(os.environ[VERDICTS], os.O_WRONLY | os.O_APPEND)
        os.write(file, f"{process} {what}\n".encode())
        os.close(file)


def told_launcher(file: str | None = None) -> list[tuple[str, str]]:
    """What processes have told their launcher: the number of each, and its text."""
    try:
        lines = Path(file or os.environ[VERDICTS]).read_text("utf-8", "replace").splitlines()
    except (KeyError, OSError):
        return []
    return [(who, what) for who, _, what in (line.partition(" ") for line in lines)]


def answers(address: str) -> bool:
    """Whether something listens at ``host:port``."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=1).close()
    except OSError:
        return False
    return True


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


# Where the threads of this process stand, for the report of a stall. It opens no file.


def _place() -> str:
    """The line of the user's code at which the main thread stands, such as ``train.py:41``."""
    innermost = sys._current_frames().get(threading.main_thread().ident or 0)
    frames = [each for each, _ in traceback.walk_stack(innermost)] if innermost else []
    is_the_users = lambda each: not each.f_code.co_filename.startswith(_NOT_THE_USERS)
    frame = next(filter(is_the_users, frames), innermost)
    if frame is None:
        return ""
    name = os.path.basename(frame.f_code.co_filename)
    # Others print it.
    return f"{name[-60:] if name.isprintable() else '_'}:{frame.f_lineno}"


def _stacks() -> str:
    """The stacks of all threads but those of the watch, each from its innermost frame on."""
    main = threading.main_thread().ident
    lines = []
    for thread, frame in sys._current_frames().items():
        found = [(each.f_code, line) for each, line in traceback.walk_stack(frame)]
        if thread == main or all(code.co_filename != __file__ for code, _ in found):
            lines.append("The main thread:" if thread == main else "Another thread:")
            lines += [f"  {code.co_filename}:{n} in {code.co_qualname}" for code, n in found]
    return "\n".join(lines)


def _on_abort(handler: ctypes.c_void_p) -> None:
    """What is called when the process is about to abort; if it returns, the process aborts."""
    library = ctypes.CDLL(None)
    library.signal.restype = ctypes.c_void_p
    library.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    library.signal(signal.SIGABRT, handler)
