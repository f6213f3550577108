"""Tests of the compiled ops of a fused decoder layer on a GPU, and of the decoder that consists of them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "kernels"))

from guards import Guards
from layer_cases import (
    check_add_sums,
    check_embed_rows,
    check_project,
    check_project_add,
    check_project_gated,
    check_project_rotated,
    check_quantize_rows,
    check_rms_norm,
    check_rope_store,
    check_silu_mul,
)

from outrider.kernels import skinny_gemm
from outrider.kernels.skinny_gemm import Epilogue, Method, Overlap, Tile
from outrider.shared.attn.base import build_batch, causal_ancestors
from outrider.shared.attn.triton import KernelAttention
from outrider.shared.nn.config.model_config import ModelConfig
from outrider.shared.nn.decoder import Decoder
from outrider.shared.nn.dummy import random_decoder
from outrider.shared.nn.fused import blocks

pytestmark = pytest.mark.gpu

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
DOT = Tile(Method.DOT, 64, 64, 1, 4, 2)
SPLIT = Tile(Method.DOT, 32, 32, 4, 4, 2)
SUM = Tile(Method.SUM, 4, 128, 1, 8)
STAY = Tile(Method.STAY, 2, 128, 1, 4, programs=100)
EARLY = Tile(Method.STAY, 1, 128, 1, 8, overlap=Overlap.EARLY, programs=132)
WIDE = Tile(Method.WIDE, 64, 64, 1, 4, 3)
WIDE_SPLIT = Tile(Method.WIDE, 128, 64, 3, 8, 4)
TALL = Tile(Method.WIDE, 32, 64, 1, 8, 3, block_m=256)
GATES = Tile(Method.WIDE, 64, 64, 1, 4, 3)
LOW_GATES = Tile(Method.WIDE, 64, 64, 1, 4, 4, block_m=64)
TALL_GATES = Tile(Method.WIDE, 64, 64, 1, 8, 4, block_m=256)
PARTS = Tile(Method.LIBRARY, splits=2)
AUX = (0, 2)
SHAPE: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 512,
    "intermediate_size": 704,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
}
FAMILIES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
BOUND = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}


# Every case compiles about ten kernels, so bf16 has many cases and the other dtypes only those that differ.
@pytest.mark.parametrize(
    ("dtype", "rows", "tile", "fp8"),
    [
        *((BF16, rows, DOT, False) for rows in (1, 3, 17, 64)),
        *((BF16, rows, SPLIT, False) for rows in (1, 5, 64)),
        *((BF16, rows, SUM, False) for rows in (1, 4)),
        *((BF16, rows, None, fp8) for rows in (1, 17, 64) for fp8 in (False, True)),
        (BF16, 1, STAY, False),
        (BF16, 1, EARLY, False),
        (BF16, 1, STAY, True),
        (F32, 1, STAY, False),
        (F32, 1, SUM, False),
        (F32, 17, DOT, False),
        (F32, 3, SPLIT, False),
        (F32, 2, None, False),
        (F16, 1, SUM, False),
        (F16, 33, DOT, False),
        *((BF16, rows, DOT, True) for rows in (3, 17, 64)),
        (BF16, 5, SPLIT, True),
        (BF16, 2, SUM, True),
        (F32, 17, DOT, True),
        (F16, 1, SUM, True),
    ],
)
def test_products(dtype: torch.dtype, rows: int, tile: Tile | None, fp8: bool) -> None:
    for columns, out in ((1024, 640), (328, 200)):
        check_project("cuda", dtype, rows, out, columns, tile, Guards(64), fp8=fp8)
        check_project_add("cuda", dtype, rows, out, columns, tile, Guards(64), bias=True, fp8=fp8)
        if tile is not SPLIT:
            check_project_gated(
                "cuda", dtype, rows, out, columns, tile, Guards(64), bias=True, gelu=out == 200, fp8=fp8
            )
        check_project_rotated(
            "cuda", dtype, rows, 8, 2, 128, columns, tile, Guards(64), bias=columns == 328, fp8=fp8
        )
    check_project("cuda", dtype, rows, 77, 101, tile, Guards(67), fp8=fp8)
    check_project_rotated("cuda", dtype, rows, 3, 1, 24, 101, tile, Guards(67), normed=False, fp8=fp8)


@pytest.mark.parametrize(
    ("dtype", "rows", "tile"),
    [
        *((BF16, rows, WIDE) for rows in (65, 128, 300)),
        (BF16, 70, WIDE_SPLIT),
        (BF16, 512, TALL),
        (BF16, 96, PARTS),
        (F16, 200, WIDE),
        (F32, 70, PARTS),
    ],
)
def test_products_of_many_rows(dtype: torch.dtype, rows: int, tile: Tile) -> None:
    for columns, out in ((1024, 640), (328, 200)):
        check_project("cuda", dtype, rows, out, columns, tile, Guards(64))
        check_project_add("cuda", dtype, rows, out, columns, tile, Guards(64), bias=True)
        check_project_rotated("cuda", dtype, rows, 8, 2, 128, columns, tile, Guards(64), bias=columns == 328)


@pytest.mark.parametrize(
    ("rows", "tile"),
    [
        (61, LOW_GATES),
        (64, LOW_GATES),
        (65, GATES),
        (96, GATES),
        (128, GATES),
        (300, TALL_GATES),
        (512, TALL),
        (100, Tile(Method.LIBRARY)),
    ],
)
def test_gated_products_of_many_rows(rows: int, tile: Tile) -> None:
    for columns, out in ((1024, 640), (328, 200)):
        check_project_gated(
            "cuda",
            BF16,
            rows,
            out,
            columns,
            tile,
            Guards(64),
            bias=out == 200,
            gelu=out == 200,
            normed=out == 640,
        )


@pytest.mark.parametrize(
    ("dtype", "rows"), [(BF16, 1), (BF16, 7), (BF16, 64), (BF16, 130), (F32, 64), (F16, 7)]
)
def test_what_lies_between_products(dtype: torch.dtype, rows: int) -> None:
    for splits in (1, 4):
        check_add_sums("cuda", dtype, rows, 4096, splits, Guards(64), bias=True)
        check_add_sums("cuda", dtype, rows, 333, splits, Guards(67), bias=False)
        check_silu_mul("cuda", dtype, rows, 14336, splits, Guards(64), bias=True, normed=True)
        check_rope_store("cuda", dtype, rows, 32, 8, 128, splits, Guards(64))
        check_rope_store("cuda", dtype, rows, 6, 2, 80, splits, Guards(67), bias=True, head_norm=True)
    check_embed_rows("cuda", dtype, rows, 4096, Guards(64))
    check_rms_norm("cuda", dtype, rows, 4099, Guards(67))
    check_quantize_rows("cuda", dtype, rows, 14336, Guards(64))


def _decoder(family: str, dtype: torch.dtype) -> Decoder:
    return random_decoder(
        ModelConfig.parse({**SHAPE, "model_type": family, "architectures": [FAMILIES[family]]}), "cuda", dtype
    )


class Step:
    """A pass of `count` rows, causal or as a tree, after a prefix of random K and V.

    It can be called repeatedly.
    """

    def __init__(self, decoder: Decoder, count: int, *, tree: bool, prefix: int = 200) -> None:
        self.decoder = decoder
        self.pool = decoder.make_pool(100, 16)
        generator = torch.Generator("cuda").manual_seed(count)
        for plane in self.pool.planes():
            plane.normal_(0.0, 1.0, generator=generator)
        lease = self.pool.lease(prefix + count)
        assert lease is not None
        masks = causal_ancestors(count, -(-count // 32), "cuda") if tree else None
        self.batch = build_batch(self.pool, [lease], [prefix], [count], ancestors=masks)
        self.tokens = torch.randint(0, 1000, (count,), generator=generator, device="cuda")
        self.positions = torch.arange(prefix, prefix + count, device="cuda")
        self.attention = KernelAttention()

    def __call__(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logits and the captured hidden states."""
        self.attention.plan(self.batch)
        output = self.decoder.forward(self.tokens, self.positions, self.attention, self.pool, AUX)
        assert output.aux is not None
        return self.decoder.logits(output.hidden).float(), output.aux.float()


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize(
    ("family", "dtype", "count", "tree"),
    [
        *(
            (family, BF16, *step)
            for family in FAMILIES
            for step in ((1, False), (6, True), (33, True), (64, True), (100, False))
        ),
        *((family, F32, 6, True) for family in FAMILIES),
        *((family, F16, count, True) for family in FAMILIES for count in (1, 6, 64, 100)),
        ("llama", F32, 100, False),
    ],
)
def test_fused_decoders_equal_their_layers(family: str, dtype: torch.dtype, count: int, tree: bool) -> None:
    decoder = _decoder(family, dtype)
    step = Step(decoder, count, tree=tree)
    assert decoder.fused is not None
    got = step()
    decoder.fused = None
    want = step()
    assert max(map(_error, got, want)) < BOUND[dtype]


@pytest.mark.parametrize("count", [1, 6, 64, 100])
@pytest.mark.parametrize("fp8", [False, True])
def test_recorded_passes_equal_called_ones(count: int, fp8: bool) -> None:
    decoder = _decoder("llama", torch.bfloat16)
    if fp8:
        decoder.quantize_fp8()
    step = Step(decoder, count, tree=True)
    want = [tensor.clone() for tensor in step()]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step()
    for _ in range(3):
        graph.replay()
        assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


def test_wide_tiles_from_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured pass of 70 rows with wide tiles is near the layers' own operations."""
    decoder = _decoder("llama", BF16)
    step = Step(decoder, 70, tree=True)

    def measured(epilogue: Epilogue, x: torch.Tensor, weight: torch.Tensor) -> Tile:
        return GATES if epilogue is Epilogue.GATED else WIDE if epilogue is Epilogue.ROTATED else WIDE_SPLIT

    for module in (blocks, skinny_gemm):
        monkeypatch.setattr(module, "choose_tile", measured)
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step()
    graph.replay()
    decoder.fused = None
    assert max(map(_error, got, step())) < BOUND[BF16]


@pytest.mark.parametrize("count", [1, 17, 100])
def test_fp8_is_near_bf16(count: int) -> None:
    decoder = _decoder("llama", torch.bfloat16)
    step = Step(decoder, count, tree=False)
    want = step()
    decoder.quantize_fp8()
    error = max(map(_error, step(), want))
    assert 0.0 < error < 0.12
