"""A real EAGLE-3 head in the target's process, rounds kept on the device: output equals output without, in batches that change."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from compute_device import DEVICE, GRAPHS
from target_harness import assert_same_tokens, generate_plain, load_toy, make_harness
from toys import make_toy_eagle3, make_toy_target

from outrider.services.draft.inproc import InprocDrafter, drafter_beside
from outrider.services.draft.settings import DraftSettings
from outrider.services.target.bucketed_verify import Buckets
from outrider.services.target.device_loop import OverlapPlan
from outrider.services.target.drafter import NoDrafter
from outrider.services.target.request import SamplingParams, SpeculationMode
from outrider.shared.engine.graphs import GraphCache
from outrider.shared.nn.decoder import Decoder

torch.set_num_threads(1)
VOCAB = 64
OVERLAP = OverlapPlan((1, 2, 4), 6)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    target = make_toy_target(folder / "target", vocab_size=VOCAB, seed=3, planted=3.0)
    return target, make_toy_eagle3(folder / "head", target, planted=3.0, draft_vocab_size=VOCAB)


@pytest.fixture(scope="module")
def decoder(folders: tuple[Path, Path]) -> Decoder:
    return load_toy(folders[0])


@pytest.fixture
def drafter(folders: tuple[Path, Path], decoder: Decoder) -> Iterator[InprocDrafter]:
    target, head = folders
    settings = DraftSettings.load({"draft": head, "target_weights": target, "device": str(DEVICE), "threads": 1, "kv_tokens": 8192})
    made = drafter_beside(decoder, settings)
    yield made
    made.shutdown()


@pytest.mark.parametrize("graphs", GRAPHS)
@pytest.mark.parametrize("shape", [(1, 1, 2), (5, 1, 6), (3, 2, 8), (5, 4, 16)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rounds_on_the_device_are_those_of_the_hosts_way(
    decoder: Decoder, drafter: InprocDrafter, shape: tuple[int, int, int], temperature: float, graphs: bool
) -> None:
    sampling = SamplingParams(temperature=temperature, seed=9)
    prompt = [1, 2, 3, 4]
    plain = generate_plain(decoder, NoDrafter(), prompt, 60, sampling=sampling)
    rounds = []
    for overlap in (None, OVERLAP):
        harness = make_harness(decoder, drafter, overlap=overlap, graphs=GraphCache(DEVICE, graphs))
        harness.submit(prompt, 60, request_id="a", sampling=sampling, shape=shape)
        harness.run()
        assert_same_tokens(decoder, prompt, plain, harness.sink.tokens["a"], sampling)
        report = harness.sink.finished["a"].speculation
        assert report.fallback_reason == ""
        rounds.append((report.rounds, report.accepted_tokens))
    assert rounds[0] == rounds[1]
    assert rounds[0][1] > 0


@pytest.mark.parametrize("graphs", GRAPHS)
@pytest.mark.parametrize("seed", range(4))
def test_batches_that_change(decoder: Decoder, drafter: InprocDrafter, seed: int, graphs: bool) -> None:
    rng = random.Random(seed)
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.choice([1, 3, 17, 60]))] for _ in range(10)]
    samplings = [
        SamplingParams(temperature=rng.choice([0.0, 0.7, 1.0]), top_p=rng.choice([1.0, 0.9]), seed=rng.randrange(1 << 64)) for _ in prompts
    ]
    lengths = [rng.randrange(1, 50) for _ in prompts]
    harness = make_harness(
        decoder,
        drafter,
        overlap=OVERLAP,
        graphs=GraphCache(DEVICE, graphs),
        buckets=Buckets.make(4, 32) if seed % 2 else None,
        max_running=rng.choice([2, 4]),
        prefill_chunk=64,
        num_pages=rng.choice([30, 60]),
    )
    waiting, handles = list(range(len(prompts))), []
    while waiting or harness.engine.num_live:
        if waiting and rng.random() < 0.2:
            index = waiting.pop(0)
            mode = rng.choice([SpeculationMode.ON, SpeculationMode.ON, SpeculationMode.AUTO, SpeculationMode.OFF])
            shape = (5, 4, 16) if rng.random() < 0.7 else (3, 1, 4)
            handles.append(
                harness.submit(prompts[index], lengths[index], request_id=str(index), sampling=samplings[index], mode=mode, shape=shape)
            )
        if handles and rng.random() < 0.05:
            harness.engine.pause(handles[-1])
        if handles and rng.random() < 0.2:
            harness.engine.resume(handles[-1])
        if harness.engine.has_work():
            harness.step()
        else:
            for handle in handles:
                harness.engine.resume(handle)
    harness.engine.check_idle()
    assert not harness.sink.failed
    for index, prompt in enumerate(prompts):
        plain = generate_plain(decoder, NoDrafter(), prompt, lengths[index], sampling=samplings[index])
        assert_same_tokens(decoder, prompt, plain, harness.sink.tokens[str(index)], samplings[index])
