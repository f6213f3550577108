"""The drafter of the embedded pair, with the head in the target's process, for tests on a GPU."""

from __future__ import annotations

from pathlib import Path

from outrider.services.draft.inproc import InprocDrafter, drafter_beside
from outrider.services.draft.settings import DraftSettings
from outrider.shared.nn.decoder import Decoder

DEMO = Path(__file__).parents[3] / "models" / "demo"
TARGET, HEAD = DEMO / "target", DEMO / "eagle3"


def make_pair_drafter(decoder: Decoder, kv_tokens: int = 16384) -> InprocDrafter:
    """Create the drafter of the embedded pair, in the target's process and dtype."""
    values = {"draft": HEAD, "target_weights": TARGET, "device": decoder.device.type, "kv_tokens": kv_tokens}
    return drafter_beside(decoder, DraftSettings.load(values))
