"""Random models: right shapes, reproducible results, and draft heads that the real reader accepts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outrider.bench.stacks.random_head import write_random_head
from outrider.bench.stacks.shapes import SHAPES, named_shape
from outrider.services.draft.heads.eagle3 import Eagle3Head
from outrider.services.draft.target_info import TargetInfo
from outrider.shared.attn.base import build_batch
from outrider.shared.attn.create import create_backend
from outrider.shared.base.errors import ConfigurationError
from outrider.shared.nn.config.model_config import ModelConfig
from outrider.shared.nn.dummy import SPREAD, RandomTensors, random_decoder
from outrider.shared.nn.open import expected_tensors

PUBLISHED_WEIGHTS = {
    "granite-3.1-2b": 2.53,
    "llama3.1-8b": 8.03,
    "llama3.2-1b": 1.24,
    "llama3.2-3b": 3.21,
    "llama3.3-70b": 70.55,
    "qwen3-8b": 8.19,
    "qwen3-1.7b": 1.72,
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_are_those_of_the_published_models(name: str) -> None:
    shapes = expected_tensors(named_shape(name).model_config())
    billions = sum(torch.Size(shape).numel() for shape in shapes.values()) / 1e9
    assert billions == pytest.approx(
        PUBLISHED_WEIGHTS.get(name, 0.0003), rel=0.01 if name in PUBLISHED_WEIGHTS else 1.0
    )


def test_an_unknown_shape_is_refused_with_the_list() -> None:
    with pytest.raises(ConfigurationError, match=r"llama3.1-8b.*tiny"):
        named_shape("gpt-5")


def test_a_random_decoder_computes_and_repeats_itself() -> None:
    config = named_shape("tiny").model_config()
    logits = []
    for _ in range(2):
        decoder = random_decoder(config, "cpu", torch.float32)
        pool = decoder.make_pool(4, 16)
        lease = pool.lease(9)
        assert lease is not None
        attention = create_backend("auto", decoder.device)
        attention.plan(build_batch(pool, [lease], [0], [9]))
        output = decoder.forward(torch.arange(9), torch.arange(9), attention, pool)
        logits.append(decoder.logits(output.hidden))
    assert logits[0].isfinite().all()
    assert logits[0].std() > 0
    assert torch.equal(*logits)


def test_a_tied_output_head_is_the_embedding() -> None:
    config = named_shape("tiny")
    tied = random_decoder(
        ModelConfig.parse({**config.target, "tie_word_embeddings": True}), "cpu", torch.float32
    )
    assert tied.lm_head is tied.embedding


def test_tensors_depend_on_their_names_alone() -> None:
    source = RandomTensors("cpu", torch.float32)
    rows = source.take_rows([("a.weight", (40, 50)), ("b.weight", (60, 50))])
    assert torch.equal(rows[:40], source.take("a.weight", (40, 50)))
    assert torch.equal(rows[40:], source.take("b.weight", (60, 50)))
    assert not torch.equal(rows[:40], rows[40:80])
    assert float(rows.std()) == pytest.approx(SPREAD, rel=0.05)
    assert source.take("x.norm.weight", (3,)).tolist() == [1, 1, 1]
    assert source.take("x.bias", (3,), to=torch.float64).dtype is torch.float64


def test_the_real_reader_takes_the_random_head(tmp_path: Path) -> None:
    shape = named_shape("tiny")
    write_random_head(tmp_path, shape, "cpu", torch.float32)
    head, keys = Eagle3Head.load(tmp_path, torch.device("cpu"), torch.float32)
    spec = head.feature_spec(TargetInfo.of("tiny", shape.model_config(), "f"))
    assert spec.aux_layer_ids == (1, 3, 4)
    assert head.vocabulary.size == 128
    assert head.vocabulary.target_ids(torch.device("cpu")).tolist() == list(range(0, 256, 2))
    assert list(head.missing()) == ["model.embed_tokens.weight"]
    assert not keys.ignored
