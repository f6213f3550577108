"""Runs the command line as ``python -m outrider.services.cli``."""

from outrider.services.cli import main

if __name__ == "__main__":
    main()
