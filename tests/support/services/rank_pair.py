"""A started target of two ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc

from outrider.target.v1 import target_pb2_grpc
from support.services.stack import Process, child_pids

TARGET_SERVICE = "outrider.target.v1.Target"


@contextmanager
def running_ranks(
    model: Path, folder: Path, *arguments: str
) -> Iterator[tuple[Process, target_pb2_grpc.TargetStub, int]]:
    """Serve a model with two ranks. Yields the process of rank 0, its API, and the process id of rank 1.

    Args:
        model: Folder of the model.
        folder: Folder for the socket and the log.
        arguments: Further arguments of `outrider serve target`.
    """
    address = f"unix:{folder}/t.sock"
    flags = ("--model", str(model), "--tp", "2", "--listen", address)
    process = Process("serve", "target", *flags, *arguments, log=folder / "target.log")
    try:
        process.wait_serving(address, TARGET_SERVICE)
        (rank,) = child_pids(process.popen.pid, "rank_main")
        with grpc.insecure_channel(address) as channel:
            yield process, target_pb2_grpc.TargetStub(channel), rank
    except BaseException:
        print(process.output[-8000:])
        raise
    finally:
        process.stop()
