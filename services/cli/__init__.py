"""The `outrider` command: its subcommands, and the flags that come from settings."""

from outrider.services.cli.commands import main

__all__ = ["main"]
