"""The projector over the wire: the target rebuilds the head's exact feature spec, including norm epsilons."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch
from support.models.toys import make_toy_eagle3, make_toy_target

from outrider.draft.v1 import draft_pb2, draft_pb2_grpc
from outrider.services.draft.app import DraftService
from outrider.services.draft.settings import DraftSettings
from outrider.services.target.draft_client.breaker import Breaker
from outrider.services.target.draft_client.link import DraftLink, TargetIdentity
from outrider.services.target.draft_client.transport.create import carrier_of
from outrider.shared.nn.open import load_decoder
from outrider.shared.rpc.client import open_channel


@pytest.mark.parametrize("normed", [False, True])
def test_the_target_rebuilds_the_feature_spec(tmp_path: Path, normed: bool) -> None:
    target_dir = make_toy_target(tmp_path / "target", vocab_size=40, hidden_size=32)
    norms = {f"fc_norm.{index}.weight": torch.rand(32) for index in range(3)} if normed else {}
    head_dir = make_toy_eagle3(
        tmp_path / "head", target_dir, extra=norms, config_overrides={"rms_norm_eps": 3e-3}
    )
    values = {
        "draft": head_dir,
        "listen": f"unix:{tmp_path}/d.sock",
        "device": "cpu",
        "target_weights": target_dir,
    }
    service = DraftService(DraftSettings.load(values))
    service.start()
    identity = TargetIdentity.of(load_decoder(target_dir))
    carriers = carrier_of(service.address, torch.device("cpu"))
    link = DraftLink(service.address, identity, lambda _name: torch.zeros(1), Breaker(1.0), carriers)
    try:
        link.start()
        deadline, pause = time.monotonic() + 20.0, threading.Event()
        while link.connection is None:
            assert time.monotonic() < deadline, "no connection"
            pause.wait(0.01)
        spec = link.connection.spec
        own = service.engine.strategy.feature_spec(None)
        assert spec is not None
        assert spec.aux_layer_ids == own.aux_layer_ids
        assert spec.projector.keys() == own.projector.keys()
        assert all(torch.equal(spec.projector[name], own.projector[name]) for name in own.projector)
        if normed:
            assert spec.norm_eps == pytest.approx(3e-3)
    finally:
        link.close()
        service.stop()


def test_info_reports_sessions_pages_and_metrics(tmp_path: Path) -> None:
    target_dir = make_toy_target(tmp_path / "target", vocab_size=40, hidden_size=32)
    head_dir = make_toy_eagle3(tmp_path / "head", target_dir)
    values = {
        "draft": head_dir,
        "listen": f"unix:{tmp_path}/d.sock",
        "device": "cpu",
        "target_weights": target_dir,
    }
    service = DraftService(DraftSettings.load(values))
    service.start()
    try:
        with open_channel(service.address) as channel:
            info = draft_pb2_grpc.DraftStub(channel).GetInfo(draft_pb2.GetInfoRequest())
        assert info.head.algorithm == "EAGLE3"
        assert info.pages_total == info.pages_free > 0
        assert "outrider_draft_trees_total" in info.prometheus_text
        assert "outrider_draft_kv_pages" in info.prometheus_text
    finally:
        service.stop()
