"""Reads the ranks of a tensor-parallel model from environment variables that `torchrun` or rank 0 sets."""

from __future__ import annotations

import os
from dataclasses import dataclass

from outrider.shared.base.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Ranks:
    """The position of this process among the ranks of a tensor-parallel model.

    Attributes:
        rank, size: The rank of this process, and the number of ranks.
        local_rank, local_size: The rank of this process among the ranks of this host, and the number of these
            ranks.
        host, port: Address of the store that all ranks connect to. Rank 0 runs on the host of the store.
        agent_store: True if `torchrun` serves the store. False if rank 0 serves the store.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    host: str
    port: int
    agent_store: bool = False

    @classmethod
    def from_environment(cls) -> Ranks:
        """Read the variables that `torchrun` sets.

        Raises:
            ConfigurationError: A variable is not a number. The error names the variable.
        """
        return cls(
            rank=_environment_number("RANK"),
            size=_environment_number("WORLD_SIZE"),
            local_rank=_environment_number("LOCAL_RANK"),
            local_size=_environment_number("LOCAL_WORLD_SIZE"),
            host=os.environ.get("MASTER_ADDR", ""),
            port=_environment_number("MASTER_PORT"),
            agent_store=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        )


def _environment_number(variable: str) -> int:
    value = os.environ.get(variable, "")
    if not value.isdecimal():
        raise ConfigurationError(
            f"The environment variable {variable} must be a number, not {value!r}; torchrun sets it.",
            field=variable,
        )
    return int(value)
