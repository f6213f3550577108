"""NVIDIA's multi-process service for one stack: kernels of target and draft run on the GPU at the same time, instead of by turns.

Only on request (`outrider up --mps`): its clients share one context, so a fatal fault of one on the GPU can end the other too.
https://docs.nvidia.com/deploy/mps
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
    """Return the path of the program that controls the service.

    Raises:
        ConfigurationError: it is not installed.
    """
    found = shutil.which(PROGRAM)
    if found is None:
        message = f"{FLAG}: {PROGRAM}, which comes with NVIDIA's driver, is not on PATH; install it, or leave {FLAG} out."
        raise ConfigurationError(message, field=FLAG)
    return found


@contextmanager
def shared_gpu(folder: Path, echo: Echo) -> Iterator[Surroundings]:
    """Run the service, with pipes and logs of its own, for the processes that start in what is yielded; it ends on leaving.

    Args:
        folder: Made here; holds pipes and logs. A short path, as it names sockets.
        echo: Gets ("mps", line).

    Raises:
        ConfigurationError: the program is missing, or says that it cannot start.
    """
    control = _Control(mps_program(), folder)
    control.start()
    try:
        yield Surroundings(control.variables, control.let_go)
    finally:
        if (trouble := control.tell("quit")[1]) is not None:
            echo("mps", f"{PROGRAM} did not quit: {trouble}")


class _Control:
    """One daemon, reached through its pipes."""

    def __init__(self, program: str, folder: Path) -> None:
        self._program = program
        self._folder = folder
        self.variables: Mapping[str, str] = {
            "CUDA_MPS_PIPE_DIRECTORY": str(folder / "pipe"),
            "CUDA_MPS_LOG_DIRECTORY": str(folder / "log"),
        }
        # The daemon would number the GPUs that it is shown anew, and its clients choose by the same variable once more.
        others = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        self._environment = {**others, **self.variables}

    def start(self) -> None:
        """Start the daemon; returns when it listens, as the program then leaves it in the background."""
        for path in self.variables.values():
            Path(path).mkdir(parents=True)
        said = self._folder / "start.log"  # a pipe would stay open for as long as the daemon lives
        try:
            with said.open("wb") as output:
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
            why = said.read_text(encoding="utf-8", errors="replace").strip() or f"exit code {code}"
            raise ConfigurationError(
                f"{FLAG}: {PROGRAM} does not start: {why}. Leave {FLAG} out to do without it.", field=FLAG
            )

    def tell(self, command: str) -> tuple[str, str | None]:
        """Return the daemon's answer to a command, and why there is none if it failed."""
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
        """Take a process off the GPU before it is killed: with work in flight its end would be that of the others too."""
        for server in self.tell("get_server_list")[0].split():
            with contextlib.suppress(ValueError):
                self.tell(f"terminate_client {int(server)} {process_id}")
