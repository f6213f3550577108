"""The `outrider` command line: its commands, their flags, and the entry points of the services."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line. Ctrl-C ends it without a traceback, even while its modules are imported."""
    try:
        if sys.argv[1:2] == ["serve"]:
            # A service starts sooner if the other commands are not imported.
            from outrider.services.cli.serve import serve_alone

            serve_alone()
            return
        from outrider.services.cli.commands import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)
