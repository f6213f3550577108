"""Makes the packages of this environment importable in another virtual environment.

The other environment's own packages take precedence. Run as ``python scripts/share_packages.py ENVIRONMENT``.
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path


def main(environment: Path) -> None:
    """Write a .pth file into `environment`, which must have the same Python version as this environment."""
    mine = Path(sysconfig.get_path("purelib"))
    theirs = environment / mine.relative_to(sys.prefix)
    # addsitedir also reads the .pth files of this environment, which editable installs need.
    (theirs / "shared_packages.pth").write_text(f"import site; site.addsitedir({str(mine)!r})\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
