"""Starts and stops NVIDIA's multi-process service (MPS), so that target and draft use the GPU concurrently.

MPS runs only on request (`outrider up --mps`). Clients of MPS share one GPU context, so a fatal GPU fault in
one process can end the other clients too. See https://docs.nvidia.com/deploy/mps.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from outrider.services.stack.supervisor import Echo, Surroundings
from outrider.shared.base.errors import ConfigurationError

PROGRAM = "nvidia-cuda-mps-control"
FLAG = "--mps"
START_LIMIT_S = 30.0
COMMAND_LIMIT_S = 10.0


def mps_program() -> str:
    """Return the path of the MPS control program.

    Raises:
        ConfigurationError: The program is not installed.
    """
    found = shutil.which(PROGRAM)
    if found is None:
        message = f"{FLAG}: {PROGRAM} is not on PATH. Install it with NVIDIA's driver, or remove {FLAG}."
        raise ConfigurationError(message, field=FLAG)
    return found


@contextmanager
def shared_gpu(folder: Path, echo: Echo) -> Iterator[Surroundings]:
    """Context manager that runs an MPS daemon (NVIDIA's multi-process service) until the context exits.

    Args:
        folder: Folder to create for the daemon's pipes and logs. The path must be short because it becomes
            part of socket names.
        echo: Called with ("mps", message) if the daemon does not quit.

    Yields:
        The environment for processes that share the GPU.

    Raises:
        ConfigurationError: The control program is missing or cannot start the daemon.
    """
    control = _Control(mps_program(), folder)
    control.start()
    try:
        yield Surroundings(control.variables, control.let_go)
    finally:
        if (trouble := control.tell("quit")[1]) is not None:
            echo("mps", f"{PROGRAM} did not quit: {trouble}")


class _Control:
    """Controls one MPS daemon through its pipes."""

    def __init__(self, program: str, folder: Path) -> None:
        self._program = program
        self._folder = folder
        self.variables: Mapping[str, str] = {
            "CUDA_MPS_PIPE_DIRECTORY": str(folder / "pipe"),
            "CUDA_MPS_LOG_DIRECTORY": str(folder / "log"),
        }
        # The daemon renumbers the GPUs that this variable lists. If the daemon's clients applied the variable
        # to the new numbers, they would use wrong GPUs, so the daemon must not see the variable.
        others = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        self._environment = {**others, **self.variables}

    def start(self) -> None:
        """Start the daemon, and return when the daemon accepts connections.

        The control program starts the daemon as a background process and then exits.
        """
        for path in self.variables.values():
            Path(path).mkdir(parents=True)
        # Use a file instead of a pipe. The daemon inherits the descriptor and would keep the pipe open.
        start_log = self._folder / "start.log"
        try:
            with start_log.open("wb") as output:
                code = subprocess.run(
                    (self._program, "-d"),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=self._environment,
                    start_new_session=True,
                    timeout=START_LIMIT_S,
                    check=False,
                ).returncode
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ConfigurationError(f"{FLAG}: cannot start {PROGRAM}: {error}.", field=FLAG) from None
        if code:
            why = start_log.read_text(encoding="utf-8", errors="replace").strip() or f"exit code {code}"
            raise ConfigurationError(
                f"{FLAG}: {PROGRAM} failed to start: {why}. Remove {FLAG} to run without it.", field=FLAG
            )

    def tell(self, command: str) -> tuple[str, str | None]:
        """Send the daemon a command.

        Returns:
            (answer, error). `error` is the reason why the command failed, or None if it succeeded.
        """
        try:
            done = subprocess.run(
                (self._program,),
                input=command + "\n",
                env=self._environment,
                capture_output=True,
                text=True,
                start_new_session=True,
                timeout=COMMAND_LIMIT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return "", str(error)
        return done.stdout, (
            done.stderr.strip() or f"exit code {done.returncode}"
        ) if done.returncode else None

    def let_go(self, process_id: int) -> None:
        """Detach a process from the GPU, as a client of MPS. Call this before the process is killed.

        Killing an MPS client while its kernels run would end the other MPS clients too.
        """
        for server in self.tell("get_server_list")[0].split():
            with contextlib.suppress(ValueError):
                self.tell(f"terminate_client {int(server)} {process_id}")
