"""EAGLE and EAGLE-3 heads behind real gRPC draft the same trees as in the target's process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine.target_harness import load_toy, make_harness
from support.models.toy_heads import (
    HIDDEN,
    LATENT,
    TARGET_LAYERS,
    VOCAB,
    Tensors,
    base_config,
    eagle3_tensors,
    eagle_tensors,
    fc_norms,
    with_latent_attention,
    write_head,
)
from support.models.toys import make_toy_target
from support.suite.compute_device import DEVICE

from outrider.services.draft.app import DraftService
from outrider.services.draft.inproc import drafter_beside
from outrider.services.draft.settings import DraftSettings
from outrider.services.target.draft_client.link import TargetIdentity
from outrider.services.target.draft_client.remote_drafter import RemoteDrafter
from outrider.shared.nn.decoder import Decoder
from outrider.shared.spec.drafter import Drafter, DrafterState

EAGLE3 = base_config(architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=24)
FOUR = {"eagle_aux_hidden_state_layer_ids": [0, 2, 4, 6], "fc_norm": True, "num_hidden_layers": 2}
HEADS: dict[str, Callable[[], tuple[dict[str, Any], Tensors]]] = {
    "EAGLE": lambda: (base_config(), eagle_tensors(embedding=False)),
    "EAGLE-3 of two layers over four": lambda: (
        EAGLE3 | FOUR,
        eagle3_tensors(layers=2, num_aux=4) | fc_norms(4),
    ),
    "EAGLE-3 with latent attention": lambda: (
        EAGLE3 | {"model_type": "kimi_k2", **LATENT},
        with_latent_attention(eagle3_tensors(prefix="layers.0.")),
    ),
}
PROMPTS = [[1, 2, 3, 4], list(range(30)), [7] * 17]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy_target(
        tmp_path_factory.mktemp("target"), vocab_size=VOCAB, hidden_size=HIDDEN, num_layers=TARGET_LAYERS
    )


def rounds_with(decoder: Decoder, drafter: Drafter) -> list[list[tuple[list[int], list[int]]]]:
    """Return, for each request and round, the drafted tokens and the emitted tokens.

    Each prompt is sent twice. The second time, its full pages are stored.
    """
    harness = make_harness(decoder, drafter)
    for name in ("first", "second"):
        for index, prompt in enumerate(PROMPTS):
            harness.submit(prompt, 16, request_id=f"{name} {index}", shape=(3, 2, 8), trace=True)
        harness.run()
    assert [harness.sink.finished[f"second {index}"].cached_tokens for index in range(3)] == [0, 16, 16]
    traces = [harness.sink.rounds[f"{name} {index}"] for name in ("first", "second") for index in range(3)]
    assert [len(trace) for trace in traces[:3]] == [len(trace) for trace in traces[3:]]
    return [[([node.token for node in one.nodes], list(one.emitted)) for one in trace] for trace in traces]


@pytest.mark.parametrize("name", HEADS)
def test_a_head_drafts_alike_beside_the_target_and_behind_grpc(
    name: str, target: Path, tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    folder = write_head(tmp_path / "head", *HEADS[name]())
    decoder = load_toy(target)
    given = {"draft": folder, "device": str(DEVICE), "dtype": "float32", "kv_tokens": 4096}
    beside = rounds_with(decoder, drafter_beside(decoder, DraftSettings.load(given)))
    service = DraftService(DraftSettings.load(given | {"listen": f"unix:{tmp_path}/draft.sock"}))
    service.start()
    drafter = RemoteDrafter(
        service.address, TargetIdentity.of(decoder), decoder.weight, DEVICE, fault_deadline_s=10.0
    )
    try:
        pause = threading.Event()
        while drafter.state() is not DrafterState.ON:
            assert drafter.refusal() is None
            pause.wait(0.005)
        remote = rounds_with(decoder, drafter)
    finally:
        drafter.shutdown()
        service.stop()
    assert remote == beside
    assert sum(len(nodes) > 1 for trace in remote for nodes, _ in trace) > 10
