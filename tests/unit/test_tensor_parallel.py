"""Shares of a model: together the ranks compute what the whole decoder computes, and what cannot be split is refused by name."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from family_models import VOCAB, Sequences, assert_near, save
from parallel_ranks import load_ranks, on_all
from toys import make_toy_target

from outrider.kernels.verify import SamplingTensors, choose_tokens
from outrider.shared.base.errors import ConfigurationError
from outrider.shared.nn import linear
from outrider.shared.nn.config import ModelConfig
from outrider.shared.nn.decoder import Decoder
from outrider.shared.nn.fused import FusedForward
from outrider.shared.nn.linear import Linear
from outrider.shared.parallel.decoder import ShardedDecoder, best_of
from outrider.shared.parallel.reduce import GroupReduce
from outrider.shared.parallel.shard import Shard

torch.set_num_threads(1)
SPLIT = ["llama", "mistral", "qwen2", "qwen2-tied-yarn", "qwen3", "qwen3-bias", "mimo", "mixtral", "qwen3-moe"]
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
    whole = Sequences(Decoder.load(path), 2)
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
    for _, aux, _ in ranks:  # every rank holds the whole residual stream
        assert aux is not None
        assert want_aux is not None
        assert_near(aux, want_aux)


@pytest.mark.parametrize("case", ["llama", "qwen3-bias"])
def test_the_fused_forward_pass_of_a_gpu_sums_over_the_ranks_too(case: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels' references stand in for them; biases of o are added once."""
    path = save(case, folder)
    want, _ = Sequences(Decoder.load(path), 1).run([0], [prompt(9)])
    monkeypatch.setattr(linear, "can_pack", lambda weight: False)
    ranks = load_ranks(path, 2)
    for rank in ranks:
        rank.fused = FusedForward(rank.layers, rank.embedding, rank.norm, Linear(rank.lm_head), reduce=GroupReduce(rank.collectives))
    parts = on_all(ranks, lambda decoder: Sequences(decoder, 1, backend="triton").run([0], [prompt(9)])[0])
    assert_near(gathered(parts, want.shape[1]), want)


def test_every_weight_is_held_once_but_what_is_replicated(folder: Path) -> None:
    path = save("llama", folder)
    whole = Decoder.load(path)
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
    logits[1, [5, 70, VOCAB - 1]] = 9.0  # a tie over the ranks: the lowest id wins
    logits[2, [80, 66]] = 9.0
    logits[3, VOCAB - 1] = 9.0
    logits[4, 90] = float("nan")
    logits[5, 2] = float("inf")
    logits[6] = -1e30
    zeros = torch.zeros(7)
    ints = zeros.int()
    greedy = SamplingTensors(zeros, ints, zeros + 1, zeros, zeros.long(), ints, all_greedy=True, any_filter=False)
    want = choose_tokens(logits, greedy, zeros.long())
    found = []
    for rank in ranks:
        rows = rank.shard.vocabulary_rows
        part = torch.nn.functional.pad(logits, (0, size * rows - VOCAB), value=99.0)[:, rank.shard.rank * rows :][:, :rows]
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
def test_sizes_that_do_not_divide_are_refused_by_name(overrides: dict[str, int], size: int, field: str, tmp_path: Path) -> None:
    config = ModelConfig.from_dir(make_toy_target(tmp_path, num_layers=1))
    with pytest.raises(ConfigurationError, match=field) as error:
        Shard.of(replace(config, **overrides), 0, size)
    assert error.value.field == "tp"


@pytest.mark.parametrize(("case", "problem"), [("gpt-oss", "fused experts of gpt_oss"), ("deepseek-v3", "latent attention of deepseek_v3")])
def test_families_that_are_not_split_are_refused_by_name(case: str, problem: str, folder: Path) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        Shard.of(ModelConfig.from_dir(save(case, folder)), 0, 2)
