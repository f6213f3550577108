"""Runs a draft in its own process for tests that step the target's engine. It can send corrupt trees."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from support.compute_device import DEVICE

SCRIPT = """
import functools, json, random, sys
import torch
from outrider.services.draft import app
from outrider.services.draft.settings import DraftSettings
from outrider.shared.rpc.ipc.cuda_blob_mailbox import StreamMailbox
from outrider.shared.rpc.ipc.blob_mailbox import HostMailbox
from outrider.shared.rpc.blob_staging import BlobStaging

values, corrupts = json.loads(sys.argv[1]), sys.argv[2] == "corrupt"
rng = random.Random(7)

def corrupt(owner, name):
    true_send = getattr(owner, name)
    def send(self, *arguments):
        at = [isinstance(argument, torch.Tensor) for argument in arguments].index(True)
        before, blob, after = arguments[:at], arguments[at], arguments[at + 1 :]
        kind = rng.choice(["noise", "near", "stale", "true"])
        last.setdefault("blob", blob.clone())
        if kind == "noise":  # arbitrary bytes
            blob[256:].view(torch.int32).random_(-(1 << 31), (1 << 31) - 1)
        elif kind == "near":  # small numbers, some of which are valid trees
            blob[256:].view(torch.int32).random_(-1, 12)
        elif kind == "stale":  # the trees of an earlier round
            blob = last["blob"]
        return true_send(self, *before, blob, *after)
    last = {}
    setattr(owner, name, send)

if corrupts:
    # Load these kernels now. The first launch waits for the device, which would deadlock while the device
    # itself waits for a state.
    blob = torch.zeros(64, dtype=torch.uint8, device=values["device"]).clone()
    blob.view(torch.int32).random_(-(1 << 31), (1 << 31) - 1)
    blob.view(torch.int32).random_(-1, 12)
    corrupt(HostMailbox, "send")
    corrupt(StreamMailbox, "send")
    corrupt(BlobStaging, "fetch")
# On a CPU too, the receiving threads only enqueue messages, as they do on a GPU.
app.DraftProtocol = functools.partial(app.DraftProtocol, only_enqueues=True)
app.run(DraftSettings.load(values))
"""


class DraftProcess:
    """A draft service on a unix socket.

    Args:
        folder: Folder for the draft's socket and log.
        scheme: Scheme of the draft's address: ``ipc://``, or ``unix:`` for gRPC.
        target, head: Folders of the checkpoints.
        spoils: Whether the draft corrupts some of the trees that it sends for rounds on the device.
    """

    def __init__(self, folder: Path, scheme: str, target: Path, head: Path, *, spoils: bool = False) -> None:
        self.address = f"{scheme}{folder}/draft.sock"
        values = {
            "draft": str(head),
            "target_weights": str(target),
            "listen": self.address,
            "device": str(DEVICE),
            "dtype": "float32",
            "threads": 1,
            "kv_tokens": 8192,
        }
        self._log = (folder / "draft.log").open("a+")
        command = [sys.executable, "-c", SCRIPT, json.dumps(values), "corrupt" if spoils else ""]
        self.popen = subprocess.Popen(
            command, stdout=self._log, stderr=subprocess.STDOUT, start_new_session=True
        )

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the process."""
        os.kill(self.popen.pid, number)

    def output(self) -> str:
        """Return the output of the process so far."""
        self._log.seek(0)
        return self._log.read()

    def stop(self) -> int:
        """Terminate the process, or kill it after 20 s, and return its exit code."""
        self.popen.terminate()
        try:
            return self.popen.wait(20)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            return self.popen.wait()
        finally:
            self._log.close()
