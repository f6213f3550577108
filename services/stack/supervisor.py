"""Runs services as child processes: restarts them when they exit, forwards their output, and stops them.

For each child, one thread starts the child, reads its output and waits for its exit. If the parent process
dies without stopping its children, Linux kills the children. Each child has a parent-death signal for this
purpose. Linux sends this signal when the thread that started the child ends.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from outrider.services.stack.standby import VARIABLE, Standby
from outrider.shared.obs.printable import printable

FIRST_BACKOFF_S = 0.2
LAST_BACKOFF_S = 5.0
# A child that ran for this many seconds counts as recovered. The next restart uses the shortest
# back-off again.
STABLE_AFTER_S = 10.0
PR_SET_PDEATHSIG = 1
KEPT_LINES = 30
COMMAND_NOT_FOUND = 127

Echo = Callable[[str, str], None]


def next_backoff(previous_s: float, lived_s: float) -> float:
    """Return the delay before a restart. The delay doubles from 0.2 s to 5 s. A stable run resets it."""
    if previous_s == 0.0 or lived_s >= STABLE_AFTER_S:
        return FIRST_BACKOFF_S
    return min(previous_s * 2, LAST_BACKOFF_S)


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """One child process that the supervisor keeps running.

    Attributes:
        name: Name of the child, and prefix of its output lines.
        command: Command line.
        drain_s: Seconds that the process may take to stop after SIGTERM. After that, the process is killed.
        hidden: Names of environment variables that the process does not inherit.
        secrets: Environment variables for this process only. Other users cannot see the environment in the
            list of processes, unlike command lines.
        standby: True to keep a standby process that takes over when the process exits. The command must call
            `standby.wait_until_needed`.
    """

    name: str
    command: tuple[str, ...]
    drain_s: float = 30.0
    hidden: tuple[str, ...] = ()
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    standby: bool = False


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The environment variables of child processes, and functions that are called when children start or end.

    Attributes:
        variables: Environment variables to add to those of this process.
        before_start: Called before each start of a child. An OSError prevents the start.
        before_kill: Called with the id of a process that did not stop in time, before the process is killed.
    """

    variables: Mapping[str, str] = field(default_factory=dict)
    before_kill: Callable[[int], None] = lambda _process_id: None
    before_start: Callable[[], None] = lambda: None


class Child:
    """A supervised child process.

    If the process exits after `Supervisor.settle` was called, it is restarted. If the process exits earlier,
    startup has failed, and the caller of `Supervisor` decides how to continue.

    Attributes:
        starts: Number of times that the process has been started.
        exit_code: Exit code of the last run, or None if no run has ended.
        last_lines: The most recent lines of the process's output.
    """

    def __init__(self, spec: ChildSpec, echo: Echo, settled: threading.Event, around: Surroundings) -> None:
        self.spec = spec
        self._around = around
        self.starts = 0
        self.exit_code: int | None = None
        self.last_lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._echo = echo
        self._settled = settled
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._standby: Standby | None = None
        self._thread = threading.Thread(target=self._run, name=f"supervise-{spec.name}", daemon=True)

    def start(self) -> None:
        """Start the process and its thread."""
        self._thread.start()

    @property
    def process_id(self) -> int | None:
        """Id of the running process, or None between an exit and the restart."""
        process = self._process
        return process.pid if process and process.poll() is None else None

    def failed(self) -> bool:
        """Return True if the process exited before `Supervisor.settle`. Such a process is not restarted."""
        return self.exit_code is not None and not self._thread.is_alive()

    def ask_to_stop(self) -> None:
        """Send SIGTERM and prevent restarts. Also send SIGCONT, because a suspended process cannot react."""
        with self._lock:
            self._stopping.set()
            self._end_standby()
            self._signal(signal.SIGTERM)
            self._signal(signal.SIGCONT)

    def kill_hung(self, starts: int, reason: str) -> None:
        """Kill the process, because it hangs, so that it is started again.

        Nothing happens if the process has been started again since the hang: `starts` is its number of starts
        at that time.
        """
        with self._lock:
            process_id = self.process_id
            if self._stopping.is_set() or self.starts != starts or process_id is None:
                return
            self._say(reason)
            self._around.before_kill(process_id)
            self._signal(signal.SIGKILL)

    def join(self) -> None:
        """Wait until the process has exited. Kill the process when its drain time is over."""
        self._thread.join(self.spec.drain_s)
        if self._thread.is_alive():
            self._say(f"did not stop within {self.spec.drain_s:g} s; killed")
            if (process_id := self.process_id) is not None:
                self._around.before_kill(process_id)
            self._signal(signal.SIGKILL)
            self._thread.join()

    def prepare_standby(self) -> None:
        """Order the standby process, if there is one, to import its code. May be called from any thread."""
        standby = self._standby
        if standby is not None:
            standby.prepare()

    def _signal(self, number: signal.Signals) -> None:
        if self._process and self._process.poll() is None:
            self._process.send_signal(number)

    def _say(self, line: str) -> None:
        """Pass a line to `echo`. Ignore errors, because the end of this thread would kill the child."""
        with contextlib.suppress(Exception):
            self._echo(self.spec.name, line)

    def _run(self) -> None:
        try:
            self._keep_running()
        finally:
            with self._lock:
                self._end_standby()

    def _end_standby(self) -> None:
        standby, self._standby = self._standby, None
        if standby is not None:
            standby.end()

    def _next_process(self) -> subprocess.Popen[str]:
        """Start the process, or let the standby process take over. Then start another standby process.

        Raises:
            OSError: The command cannot be started.
        """
        self._around.before_start()
        standby, self._standby = self._standby, None
        process = None if standby is None else standby.take_over()
        if process is not None:
            self._say("a standby process takes over")
        else:
            if standby is not None and standby.exit_code is not None:
                self._say(f"the standby process had ended with {_describe_exit(standby.exit_code)}")
                for line in standby.output.splitlines()[-KEPT_LINES:]:
                    self._say(printable(line))
            process = _spawn(self.spec, self._around.variables)
        if self.spec.standby:
            variables = {**self._around.variables, VARIABLE: "1"}
            self._standby = Standby(_spawn(self.spec, variables, stdin=subprocess.PIPE))
            if self._settled.is_set():
                # Import later, because the process that takes over needs the CPU first.
                timer = threading.Timer(STABLE_AFTER_S, self.prepare_standby)
                timer.daemon = True
                timer.start()
        return process

    def _keep_running(self) -> None:
        backoff_s = 0.0
        while True:
            # Start under the lock, so that `ask_to_stop` cannot miss a process that is just being started.
            with self._lock:
                if self._stopping.is_set():
                    return
                started = time.monotonic()
                try:
                    process = self._process = self._next_process()
                except OSError as error:
                    self.exit_code = COMMAND_NOT_FOUND
                    self._say(f"cannot start {self.spec.command[0]}: {error}")
                    return
                self.starts += 1
            assert process.stdout is not None
            for line in process.stdout:
                text = printable(line.rstrip("\n"))
                self.last_lines.append(text)
                self._say(text)
            self.exit_code = process.wait()
            process.stdout.close()
            if self._stopping.is_set() or not self._settled.is_set():
                return
            backoff_s = next_backoff(backoff_s, time.monotonic() - started)
            self._say(f"exited with {_describe_exit(self.exit_code)}; restarting in {backoff_s:g} s")
            if self._stopping.wait(backoff_s):
                return


class Supervisor:
    """A group of child processes that start together and stop one after the other.

    The context manager stops all children on exit, in the order in which they were given. The gateway comes
    first, so that its streams can finish while the target still runs.
    """

    def __init__(self, specs: Sequence[ChildSpec], echo: Echo, around: Surroundings | None = None) -> None:
        self._settled = threading.Event()
        self.children = [Child(spec, echo, self._settled, around or Surroundings()) for spec in specs]

    def __enter__(self) -> Supervisor:
        for child in self.children:
            child.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def child(self, name: str) -> Child:
        """Return a child by name."""
        return next(child for child in self.children if child.spec.name == name)

    def failed(self) -> Child | None:
        """Return a child that exited before `settle`, or None."""
        return next((child for child in self.children if child.failed()), None)

    def settle(self) -> None:
        """Mark startup as complete. From now on, children that exit are restarted or replaced."""
        self._settled.set()
        for child in self.children:
            child.prepare_standby()

    def stop(self) -> None:
        """Drain the children one after the other, and return when all have exited."""
        for child in self.children:
            child.ask_to_stop()
            child.join()


_DIE_WITH_PARENT = f"""
import ctypes, os, signal, sys
signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores this signal, and programs inherit that
ctypes.CDLL(None).prctl({PR_SET_PDEATHSIG}, {int(signal.SIGKILL)})
if os.getppid() != int(sys.argv[1]):
    sys.exit("the supervisor has ended")
os.execvp(sys.argv[2], sys.argv[2:])
"""


def _spawn(
    spec: ChildSpec, variables: Mapping[str, str], stdin: int = subprocess.DEVNULL
) -> subprocess.Popen[str]:
    """Start a child process that Linux kills when the calling thread ends.

    The child gets its own session, so that Ctrl-C in a terminal reaches only the supervisor.

    Raises:
        OSError: The command does not exist.
    """
    if shutil.which(spec.command[0]) is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    command = list(spec.command)
    if sys.platform == "linux":
        # A small program sets the parent-death signal and then becomes the child. `preexec_fn` could set the
        # signal too, but then Python would fork this process. gRPC, which probes the services from other
        # threads, sometimes aborts the forked process.
        command = [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid()), *command]
    env = {**os.environ, **variables, **spec.secrets}
    return subprocess.Popen(
        command,
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={name: value for name, value in env.items() if name not in spec.hidden},
        text=True,
        errors="replace",
        start_new_session=True,
    )


def _describe_exit(code: int) -> str:
    return f"code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
