"""Tests of `--deterministic` on a GPU: invariant kernels at real sizes; tokens and logits with equal bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from guards import Guards
from invariant_cases import (
    check_against_tree_attention,
    check_gemm,
    check_gemm_rows,
    check_histories,
    check_norm,
)
from support.engine.deterministic_rig import (
    PROMPT,
    assert_bits,
    harness_of,
    load,
    logits_in_chunks,
    plain,
    recorded,
)
from support.engine.target_harness import FakeDrafter, oracle_plan, random_plan
from support.models.toys import make_toy_target

from outrider.services.target.drafting.no_drafter import NoDrafter
from outrider.services.target.engine.loop_plan import LoopPlan
from outrider.shared.base.generation import SamplingParams, SpeculationMode
from outrider.shared.engine.graphs import GraphCache
from outrider.shared.nn.config.model_config import ModelConfig
from outrider.shared.nn.decoder import Decoder
from outrider.shared.nn.deterministic import deterministic
from outrider.shared.nn.dummy import random_decoder
from outrider.shared.nn.open import load_decoder

pytestmark = pytest.mark.gpu

DTYPES = [torch.float32, torch.bfloat16]
VOCAB = 64
NEW_TOKENS = 64


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize(("rows", "width", "out"), [(1, 4096, 6144), (65, 1000, 333), (7, 14336, 4096)])
def test_gemm(dtype: torch.dtype, rows: int, width: int, out: int) -> None:
    check_gemm("cuda", dtype, rows, width, out, Guards(64))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "out"), [(4096, 6144), (14336, 4096), (4096, 28672), (320, 96)])
def test_gemm_gives_a_row_the_same_bits_in_every_batch(dtype: torch.dtype, width: int, out: int) -> None:
    check_gemm_rows("cuda", dtype, (1, 2, 3, 16, 17, 64, 65, 512), width, out)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "heads"), [(4096, None), (100, None), (128, 40)])
def test_norm(dtype: torch.dtype, size: int, heads: int | None) -> None:
    check_norm("cuda", dtype, 70, size, Guards(64), heads)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("length", "nodes"), [(6, 5), (131, 5), (900, 17), (2048, 9)])
def test_attention_gives_equal_histories_equal_bits(dtype: torch.dtype, length: int, nodes: int) -> None:
    check_histories("cuda", dtype, length, nodes)
    check_histories("cuda", dtype, length, nodes, window=100, sinks=torch.linspace(-1, 1, 4, device="cuda"))
    check_histories("cuda", dtype, length, nodes, softcap=4.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_is_tree_attention(dtype: torch.dtype) -> None:
    check_against_tree_attention("cuda", dtype)
    check_against_tree_attention("cuda", dtype, window=7)


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy_target(
        tmp_path_factory.mktemp("target"),
        vocab_size=VOCAB,
        hidden_size=512,
        intermediate_size=1408,
        head_dim=64,
        num_heads=8,
        seed=3,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "sampling", [None, SamplingParams(temperature=0.9, top_k=20, top_p=0.9, min_p=0.01, seed=11)]
)
def test_no_bit_changes_with_speculation_batches_or_chunks(
    target_dir: Path, dtype: torch.dtype, sampling: SamplingParams | None
) -> None:
    _check_no_bit_changes(load(target_dir, "cuda", dtype), sampling)


QWEN3 = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": 320,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
}
"""Config of a family that norms each head of q and k."""


@pytest.mark.parametrize("kv_dtype", [None, torch.float8_e4m3fn], ids=["wide", "fp8"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_bit_changes_with_norms_of_heads_or_a_narrow_cache(
    dtype: torch.dtype, kv_dtype: torch.dtype | None
) -> None:
    decoder = random_decoder(ModelConfig.parse(QWEN3), "cuda", dtype)
    decoder.kv_dtype = kv_dtype
    decoder = deterministic(decoder)
    assert decoder.make_pool(1, 16).k_planes[0].dtype is (kv_dtype or dtype)
    _check_no_bit_changes(decoder, None)


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_bit_changes_over_a_narrow_cache_of_a_plain_model(target_dir: Path, dtype: torch.dtype) -> None:
    decoder = load_decoder(target_dir, "cuda", dtype)
    decoder.kv_dtype = torch.float8_e4m3fn
    _check_no_bit_changes(deterministic(decoder), SamplingParams(temperature=0.9, top_p=0.9, seed=5))


def _check_no_bit_changes(decoder: Decoder, sampling: SamplingParams | None) -> None:
    """Check that speculation, other requests, chunk sizes and page sizes change no bit of the logits."""
    tokens, logits = plain(decoder, NEW_TOKENS, sampling)
    drafters = [FakeDrafter(oracle_plan([PROMPT + tokens], VOCAB, 0.7)), FakeDrafter(random_plan(VOCAB))]
    for drafter, chunk, shape in zip(drafters, (512, 3), ((6, 4, 30), (3, 2, 8)), strict=True):
        harness = harness_of(decoder, drafter, prefill_chunk=chunk, page_size=3)
        harness.submit(
            list(range(40)),
            NEW_TOKENS,
            request_id="other",
            shape=(2, 3, 7),
            sampling=SamplingParams(temperature=1.5, seed=1),
        )
        harness.submit(PROMPT, NEW_TOKENS, request_id="mine", shape=shape, sampling=sampling)
        with recorded(decoder) as rows:
            harness.run()
        assert harness.sink.tokens["mine"] == tokens
        assert_bits(logits, rows)


@pytest.mark.parametrize("dtype", DTYPES)
def test_graphs_and_rounds_ahead_of_the_host_choose_the_same_tokens(
    target_dir: Path, dtype: torch.dtype
) -> None:
    decoder = load(target_dir, "cuda", dtype)
    tokens, _ = plain(decoder, NEW_TOKENS)
    graphs, plan = GraphCache(decoder.device), LoopPlan(lookahead=1)
    harness = harness_of(decoder, NoDrafter(decoder.device), graphs=graphs, plan=plan)
    for name in ("a", "b", "c"):
        harness.submit(PROMPT, NEW_TOKENS, request_id=name, mode=SpeculationMode.OFF)
    harness.run()
    assert [harness.sink.tokens[name] for name in ("a", "b", "c")] == [tokens] * 3
    assert graphs.keys


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_prompt_in_one_pass_has_the_bits_of_single_steps(target_dir: Path, dtype: torch.dtype) -> None:
    decoder = load(target_dir, "cuda", dtype)
    ids = torch.randint(VOCAB, (300,), generator=torch.Generator().manual_seed(0)).tolist()
    whole = logits_in_chunks(decoder, ids, [300], page_size=16)
    assert torch.equal(logits_in_chunks(decoder, ids, [1] * 300, page_size=16), whole)
    assert torch.equal(logits_in_chunks(decoder, ids, [70, 130, 100], page_size=16), whole)
