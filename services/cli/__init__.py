"""The `outrider` command line: its commands, their flags, and the entry points of the services."""

from outrider.services.cli.commands import main

__all__ = ["main"]
