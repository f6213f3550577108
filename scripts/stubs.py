"""Writes the protobuf and gRPC stubs beside their protos, or checks that the committed stubs are up to date.

`make stubs` and `make stubs-check` run this script, which needs grpcio-tools and mypy-protobuf.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
GENERATED = ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py", "*_pb2_grpc.pyi")


def generate(target: Path) -> None:
    """Run protoc with its Python, gRPC and typing plugins on every proto.

    protoc writes the stubs into the folder `target`.
    """
    protos = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.rglob("*.proto"))
    outputs = [
        f"--python_out={target}",
        f"--mypy_out=quiet:{target}",
        f"--grpc_python_out={target}",
        f"--mypy_grpc_out=quiet:{target}",
    ]
    environment = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTOS}", *outputs, *protos],
        check=True,
        cwd=PROTOS,
        env=environment,
    )


def stubs_below(folder: Path) -> dict[str, bytes]:
    """Return the content of each generated file in a folder, by relative path."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for pattern in GENERATED
        for path in folder.rglob(pattern)
    }


def main(action: str) -> int:
    """Write the stubs (`write`) or check that they are up to date (`check`). Return the exit code."""
    if action == "write":
        generate(PROTOS)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        fresh, committed = stubs_below(Path(folder)), stubs_below(PROTOS)
    stale = sorted(name for name in fresh.keys() | committed.keys() if fresh.get(name) != committed.get(name))
    for name in stale:
        print(f"protos/{name}: does not match its proto; run `make stubs`", file=sys.stderr)
    print(f"{len(fresh)} stubs checked, {len(stale)} stale")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
