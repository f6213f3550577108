"""Tests that ranks together compute the results of one decoder, and refuse models that cannot be split."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.engine.parallel_ranks import load_ranks, on_all
from support.models import generic_models
from support.models.family_models import (
    CASES,
    GPT_OSS,
    VOCAB,
    Sequences,
    assert_near,
    pack_mxfp4,
    save,
    store_fp8,
)
from support.models.toys import make_toy_target

from outrider.kernels.verify import SamplingTensors, choose_tokens
from outrider.shared.base.errors import ConfigurationError
from outrider.shared.nn.fused import FusedForward
from outrider.shared.nn.layers import linear
from outrider.shared.nn.layers.linear import Linear
from outrider.shared.nn.open import load_decoder, read_model_config
from outrider.shared.parallel.decoder import ShardedDecoder, best_of
from outrider.shared.parallel.reduce import GroupReduce
from outrider.shared.parallel.shard import Shard

torch.set_num_threads(1)
SPLIT = [
    "llama", "mistral", "qwen2", "qwen2-tied-yarn", "qwen3", "qwen3-bias", "mimo", "mixtral", "qwen3-moe",
    "gpt-oss", "gpt-oss-narrow", "deepseek-v2-lite", "deepseek-v2", "deepseek-v3",
]  # fmt: skip
AUX = (0, 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


def prompt(length: int, vocab: int = 32) -> list[int]:
    rng = random.Random(length)
    return [rng.randrange(vocab) for _ in range(length)]


def gathered(parts: list[torch.Tensor], vocab: int) -> torch.Tensor:
    return torch.cat(parts, dim=1)[:, :vocab]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("case", SPLIT)
def test_the_ranks_together_compute_what_the_whole_decoder_does(case: str, size: int, folder: Path) -> None:
    path = save(case, folder)
    whole = Sequences(load_decoder(path), 2)
    want, want_aux = whole.run([0, 0], [prompt(9), prompt(30)], aux=AUX)
    later, _ = whole.run([9, 30], [[3], [5, 6]])

    def run(decoder: ShardedDecoder) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        sequences = Sequences(decoder, 2)
        assert sequences.pool.kv_heads == max(1, whole.pool.kv_heads // size)
        columns, aux = sequences.run([0, 0], [prompt(9), prompt(30)], aux=AUX)
        return columns, aux, sequences.run([9, 30], [[3], [5, 6]])[0]

    ranks = on_all(load_ranks(path, size), run)
    vocab = want.shape[1]
    assert_near(gathered([columns for columns, _, _ in ranks], vocab), want)
    assert_near(gathered([columns for _, _, columns in ranks], vocab), later)
    for _, aux, _ in ranks:  # Every rank has the whole residual stream.
        assert aux is not None
        assert want_aux is not None
        assert_near(aux, want_aux)


@pytest.mark.parametrize("case", ["llama", "qwen3-bias"])
def test_the_fused_forward_pass_of_a_gpu_sums_over_the_ranks_too(
    case: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels' references replace the kernels. Biases of o must be added once."""
    path = save(case, folder)
    want, _ = Sequences(load_decoder(path), 1).run([0], [prompt(9)])
    monkeypatch.setattr(linear, "can_pack", lambda weight: False)
    ranks = load_ranks(path, 2)
    for rank in ranks:
        rank.fused = FusedForward(
            rank.layers, rank.embedding, rank.norm, Linear(rank.lm_head), reduce=GroupReduce(rank.collectives)
        )
    parts = on_all(ranks, lambda decoder: Sequences(decoder, 1, backend="triton").run([0], [prompt(9)])[0])
    assert_near(gathered(parts, want.shape[1]), want)


def test_every_weight_is_held_once_but_what_is_replicated(folder: Path) -> None:
    path = save("llama", folder)
    whole = load_decoder(path)
    embedding, head = whole.embedding.nbytes, whole.lm_head.nbytes
    layers = whole.weight_bytes - embedding - head
    ranks = load_ranks(path, 2)
    padded = ranks[0].lm_head.nbytes
    assert [rank.weight_bytes for rank in ranks] == [embedding + layers // 2 + padded] * 2
    assert padded * 2 >= head
    assert [rank.token_bytes() for rank in ranks] == [whole.token_bytes() // 2] * 2


@pytest.mark.parametrize("size", [2, 4])
def test_the_best_columns_give_the_greedy_token(size: int, folder: Path) -> None:
    ranks = load_ranks(save("llama", folder), size)
    logits = torch.randn(7, VOCAB)
    logits[1, [5, 70, VOCAB - 1]] = 9.0  # A tie between ranks: the lowest id wins.
    logits[2, [80, 66]] = 9.0
    logits[3, VOCAB - 1] = 9.0
    logits[4, 90] = float("nan")
    logits[5, 2] = float("inf")
    logits[6] = -1e30
    zeros = torch.zeros(7)
    ints = zeros.int()
    greedy = SamplingTensors(
        zeros, ints, zeros + 1, zeros, zeros.long(), ints, all_greedy=True, any_filter=False
    )
    want = choose_tokens(logits, greedy, zeros.long())
    found = []
    for rank in ranks:
        rows = rank.shard.vocabulary_rows
        part = torch.nn.functional.pad(logits, (0, size * rows - VOCAB), value=99.0)[
            :, rank.shard.rank * rows :
        ][:, :rows]
        rank.columns = lambda hidden, part=part: part  # type: ignore[method-assign,misc]
        found.append(rank.best(torch.zeros(7, 64)))
    assert best_of(torch.stack(found)).tolist() == want.tolist()
    assert want[1] == 5
    assert want[4] == want[5] == -1


@pytest.mark.parametrize(
    ("overrides", "size", "field"),
    [
        ({"num_heads": 3, "num_kv_heads": 3}, 2, "num_attention_heads 3"),
        ({"num_heads": 12, "num_kv_heads": 6}, 4, "num_key_value_heads 6"),
        ({"num_heads": 4, "num_kv_heads": 4, "intermediate_size": 90}, 4, "intermediate_size 90"),
    ],
)
def test_sizes_that_do_not_divide_are_refused_by_name(
    overrides: dict[str, int], size: int, field: str, tmp_path: Path
) -> None:
    config = read_model_config(make_toy_target(tmp_path, num_layers=1))
    with pytest.raises(ConfigurationError, match=field) as error:
        Shard.of(replace(config, **overrides), 0, size)
    assert error.value.field == "tp"


@pytest.fixture
def packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a gpt-oss as released, with five groups of MXFP4 in an expert's intermediate size."""
    monkeypatch.setitem(CASES, "gpt-oss-wide", ("GptOss", GPT_OSS | {"intermediate_size": 160}))
    pack_mxfp4(tmp_path / "packed", save("gpt-oss-wide", tmp_path))
    return tmp_path / "packed"


@pytest.mark.parametrize(("size", "groups"), [(2, [2, 3]), (4, [1, 1, 1, 2])])
def test_experts_in_mxfp4_are_split_by_their_groups(size: int, groups: list[int], packed: Path) -> None:
    want, _ = Sequences(load_decoder(packed), 1).run([0], [prompt(30)])
    ranks = load_ranks(packed, size)
    held = [layer.mlp.inner.weights.down.shape[2] for layer in (rank.layers[0] for rank in ranks)]  # type: ignore[attr-defined]
    assert held == [32 * count for count in groups]
    parts = on_all(ranks, lambda decoder: Sequences(decoder, 1).run([0], [prompt(30)])[0])
    assert_near(gathered(parts, want.shape[1]), want)


def test_more_ranks_than_groups_are_refused(packed: Path) -> None:
    config = replace(read_model_config(packed), num_heads=8, num_kv_heads=8)
    with pytest.raises(ConfigurationError, match="have intermediate_size 160, fewer than 8 groups of 32"):
        Shard.of(config, 0, 8)


def test_experts_stored_in_fp8_are_split_as_they_are_widened(folder: Path, tmp_path: Path) -> None:
    store_fp8(tmp_path / "fp8", save("deepseek-v3", folder), (16, 16))
    want, _ = Sequences(load_decoder(tmp_path / "fp8"), 1).run([0], [prompt(30)])
    parts = on_all(
        load_ranks(tmp_path / "fp8", 2), lambda decoder: Sequences(decoder, 1).run([0], [prompt(30)])[0]
    )
    assert_near(gathered(parts, want.shape[1]), want)


@pytest.mark.parametrize("case", ["gpt-oss", "deepseek-v3"])
def test_every_expert_and_head_is_held_once(case: str, folder: Path) -> None:
    """Whole on every rank: router, projections into the latents, biases, embedding and norms."""
    whole, ranks = load_decoder(save(case, folder)), load_ranks(save(case, folder), 2)
    for layer, parts in zip(whole.layers, zip(*(rank.layers for rank in ranks), strict=True), strict=True):
        assert sum(part.mlp.nbytes for part in parts) == layer.mlp.nbytes
        extra = sum(part.attention.nbytes for part in parts) - layer.attention.nbytes
        shared = (
            [] if case == "gpt-oss" else [(24 + 8) * 64, 20 * 64]
        )  # Sizes of the projections into the K/V latent and the query latent.
        assert extra == 4 * sum(shared)


def test_models_that_run_through_transformers_are_refused_by_name(folder: Path) -> None:
    with pytest.raises(ConfigurationError, match="models that run through transformers"):
        Shard.of(read_model_config(generic_models.save("gpt2", folder)), 0, 2)
