"""Writes the wire format of this release to `tests/support/connection/released_wire.binpb`.

Run it after each release. The tests read this file to act as the previous release: they remove every field
that the previous release does not define from the messages.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
RELEASED = ROOT / "tests" / "support" / "connection" / "released_wire.binpb"


def freeze(protos: Path, target: Path) -> None:
    """Write the descriptors of all protos in the folder `protos` to `target`, as one `FileDescriptorSet`."""
    files = sorted(str(path.relative_to(protos)) for path in protos.rglob("*.proto"))
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I.", f"--descriptor_set_out={target}", *files]
    subprocess.run(command, check=True, cwd=protos)


if __name__ == "__main__":
    freeze(PROTOS, RELEASED)
