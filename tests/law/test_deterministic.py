"""`--deterministic`: the logits of a token always have the same bits.

The bits are the same with and without speculation, alone and in a batch, and with any chunking of prompts.
"""

from __future__ import annotations

import random
from pathlib import Path
from unittest import mock

import pytest
import torch
from support.engine.deterministic_rig import (
    PROMPT,
    assert_bits,
    harness_of,
    load,
    logits_in_chunks,
    plain,
    recorded,
)
from support.engine.device_toys import AnswerDrafter
from support.engine.target_harness import FakeDrafter, oracle_plan, random_plan
from support.models import family_models, generic_models
from support.models.toys import make_toy_target
from support.suite.compute_device import DEVICE, GRAPHS

from outrider.kernels.verify import SamplingTensors
from outrider.services.target.drafting.no_drafter import NoDrafter
from outrider.services.target.engine.loop_plan import LoopPlan
from outrider.shared.base.errors import ConfigurationError
from outrider.shared.base.generation import SamplingParams, SpeculationMode
from outrider.shared.base.logit_rules import LogitRules, LogprobParams
from outrider.shared.engine.graphs import GraphCache
from outrider.shared.nn.decoder import Decoder
from outrider.shared.nn.deterministic import BatchInvariant, deterministic
from outrider.shared.nn.open import load_decoder
from outrider.shared.spec.drafter import FeatureSpec

torch.set_num_threads(1)
VOCAB = 61  # an odd size, because vector units round differently at the ends of rows
NEW_TOKENS = 24
DTYPES = [torch.float32, torch.bfloat16]
AHEAD = LoopPlan(lookahead=1, drafts_on_device=True, max_depth=5, max_nodes=21)


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy_target(
        tmp_path_factory.mktemp("target"),
        vocab_size=VOCAB,
        hidden_size=60,
        intermediate_size=90,
        head_dim=15 * 2,
        num_layers=6,
        seed=3,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 1, 6), (4, 3, 20)])
def test_speculation_changes_no_bit(
    target_dir: Path, dtype: torch.dtype, shape: tuple[int, int, int]
) -> None:
    decoder = load(target_dir, DEVICE, dtype)
    tokens, logits = plain(decoder, NEW_TOKENS)
    harness = harness_of(decoder, FakeDrafter(oracle_plan([PROMPT + tokens], VOCAB, 0.7)))
    harness.submit(PROMPT, NEW_TOKENS, request_id="spec", shape=shape)
    with recorded(decoder) as rows:
        harness.run()
    assert harness.sink.tokens["spec"] == tokens
    assert harness.sink.finished["spec"].speculation.accepted_tokens > 5
    assert_bits(logits, rows)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_neither_chunks_nor_other_requests_change_a_bit(
    target_dir: Path, dtype: torch.dtype, chunk: int
) -> None:
    decoder = load(target_dir, DEVICE, dtype)
    tokens, logits = plain(decoder, NEW_TOKENS)
    harness = harness_of(
        decoder, FakeDrafter(random_plan(VOCAB, seed=chunk)), prefill_chunk=chunk, page_size=3
    )
    rng = random.Random(chunk)
    for number in range(2):
        harness.submit(
            [rng.randrange(VOCAB) for _ in range(11)], 15, request_id=f"other{number}", shape=(3, 2, 6)
        )
    harness.submit(PROMPT, NEW_TOKENS, request_id="mine", shape=(4, 2, 9))
    with recorded(decoder) as rows:
        harness.run()
    assert harness.sink.tokens["mine"] == tokens
    assert_bits(logits, rows)


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=1.0, seed=3),
        SamplingParams(temperature=0.8, top_k=9, top_p=0.9, min_p=0.01, seed=(1 << 64) - 5),
    ],
)
def test_sampling_chooses_the_same_tokens(target_dir: Path, sampling: SamplingParams) -> None:
    decoder = load(target_dir, DEVICE, torch.bfloat16)
    tokens, logits = plain(decoder, NEW_TOKENS, sampling)
    harness = harness_of(decoder, FakeDrafter(oracle_plan([PROMPT + tokens], VOCAB, 0.7)))
    harness.submit(
        PROMPT,
        NEW_TOKENS,
        request_id="other",
        shape=(2, 3, 7),
        sampling=SamplingParams(temperature=1.5, top_p=0.7, seed=1),
    )
    harness.submit(PROMPT, NEW_TOKENS, request_id="spec", shape=(5, 4, 16), sampling=sampling)
    with recorded(decoder) as rows:
        harness.run()
    assert harness.sink.tokens["spec"] == tokens
    assert_bits(logits, rows)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_rules_and_logprobs_have_the_same_bits(target_dir: Path, temperature: float) -> None:
    decoder = load(target_dir, DEVICE, torch.bfloat16)
    rules = LogitRules(0.5, 0.7, 1.2, logit_bias=((3, 2.0),), bad_words=((4,), (5, 6)))
    sampling = SamplingParams(temperature, top_p=0.95, seed=3, rules=rules)
    wanted = LogprobParams(top=5, prompt_top=2)
    alone = harness_of(decoder, NoDrafter(), prefill_chunk=3)
    alone.submit(PROMPT, NEW_TOKENS, request_id="spec", sampling=sampling, logprobs=wanted)
    alone.run()
    tokens = alone.sink.tokens["spec"]
    harness = harness_of(decoder, FakeDrafter(oracle_plan([PROMPT + tokens], VOCAB, 0.7)))
    harness.submit(PROMPT, NEW_TOKENS, request_id="other", shape=(2, 3, 7))
    harness.submit(
        PROMPT, NEW_TOKENS, request_id="spec", shape=(5, 4, 16), sampling=sampling, logprobs=wanted
    )
    harness.run()
    assert harness.sink.finished["spec"].speculation.accepted_tokens > 5
    assert harness.sink.tokens["spec"] == tokens
    assert harness.sink.logprobs["spec"] == alone.sink.logprobs["spec"]
    assert harness.sink.prompt_logprobs["spec"] == alone.sink.prompt_logprobs["spec"]


@pytest.mark.parametrize("graphs", GRAPHS)
def test_padded_rounds_and_rounds_ahead_of_the_host_change_no_bit(target_dir: Path, graphs: bool) -> None:
    """Padding rows are computed together with the three real ones."""
    decoder = load(target_dir, DEVICE, torch.float32)
    tokens, logits = plain(decoder, NEW_TOKENS)
    for plan in (None, AHEAD):
        cache = GraphCache(DEVICE, graphs)
        harness = harness_of(decoder, NoDrafter(), plan=plan, graphs=cache)
        for name in ("a", "b", "c"):
            harness.submit(PROMPT, NEW_TOKENS, request_id=name, mode=SpeculationMode.OFF)
        if graphs:
            harness.run()
            assert cache.keys
        else:
            with recorded(decoder) as rows:
                harness.run()
            assert_bits(logits, rows)
        assert [harness.sink.tokens[name] for name in ("a", "b", "c")] == [tokens] * 3


@pytest.mark.parametrize("graphs", GRAPHS)
@pytest.mark.parametrize(
    ("dtype", "shape", "temperature"),
    [
        (torch.float32, (5, 1, 6), 0.0),
        (torch.float32, (5, 4, 21), 1.0),
        (torch.bfloat16, (5, 1, 6), 1.0),
        (torch.bfloat16, (5, 4, 21), 0.0),
    ],
)
def test_drafted_rounds_on_the_device_choose_the_same_tokens(
    target_dir: Path, dtype: torch.dtype, shape: tuple[int, int, int], temperature: float, graphs: bool
) -> None:
    """No near-tie is excused here, even in 16 bits. The cases contain every pair of two values."""
    decoder = load(target_dir, DEVICE, dtype)
    sampling = SamplingParams(temperature=temperature, seed=3)
    tokens, _ = plain(decoder, NEW_TOKENS, sampling)
    drafter = AnswerDrafter([PROMPT + tokens], VOCAB, 0.7, checked=not graphs)
    harness = harness_of(decoder, drafter, plan=AHEAD, graphs=GraphCache(DEVICE, graphs))
    for name in ("a", "b", "c"):
        harness.submit(PROMPT, NEW_TOKENS, request_id=name, shape=shape, sampling=sampling)
    harness.run()
    assert [harness.sink.tokens[name] for name in ("a", "b", "c")] == [tokens] * 3
    assert drafter.seats > 0
    assert harness.engine.stats().speculation.accepted_tokens > 0


@pytest.mark.parametrize(("dtype", "chunk"), [(torch.float32, 64), (torch.bfloat16, 2)])
def test_a_mixed_round_changes_no_bit(target_dir: Path, dtype: torch.dtype, chunk: int) -> None:
    """Chains, trees, plain entries and prompts in chunks are computed together, and join at different times.

    Every data type and every chunk size is used once.
    """
    decoder = load(target_dir, DEVICE, dtype)
    samplings = [None, SamplingParams(temperature=0.8, top_k=9, top_p=0.9, min_p=0.01, seed=5)]
    runs = [plain(decoder, NEW_TOKENS, sampling) for sampling in samplings]
    drafter = AnswerDrafter([PROMPT + tokens for tokens, _ in runs[:1]], VOCAB, 0.7)
    harness = harness_of(decoder, drafter, plan=AHEAD, prefill_chunk=chunk, page_size=3)
    shapes = [(5, 1, 6), (5, 4, 21), None, (3, 2, 7)]
    with recorded(decoder) as rows:
        for number, shape in enumerate(shapes * 2):
            harness.submit(
                PROMPT,
                NEW_TOKENS,
                request_id=str(number),
                shape=shape,
                mode=SpeculationMode.ON if shape else SpeculationMode.OFF,
                sampling=samplings[number % 2],
                trace=number == 3,
            )
            for _ in range(2):
                harness.step()
        harness.run()
    for number in range(2 * len(shapes)):
        assert harness.sink.tokens[str(number)] == runs[number % 2][0]
    for _, logits in runs:
        assert_bits(logits, rows)


@pytest.mark.parametrize("seed", [1, 2])
def test_packed_chunks_of_any_length_change_no_bit(target_dir: Path, seed: int) -> None:
    """Steps take a random number of prompt tokens, of several prompts at once, while others decode."""
    decoder = load(target_dir, DEVICE, torch.bfloat16)
    tokens, logits = plain(decoder, NEW_TOKENS)
    harness = harness_of(decoder, FakeDrafter(random_plan(VOCAB, seed=seed)), page_size=3)
    rng = random.Random(seed)
    budget = mock.patch.object(harness.engine._budget, "tokens", side_effect=lambda _: rng.randint(1, 12))
    begin = mock.patch.object(harness.runner, "begin_prefill", side_effect=harness.runner.begin_prefill)
    with recorded(decoder) as rows, budget, begin as passes:
        for name in ("a", "b", "c", "d"):
            # Salts keep the equal prompts from sharing their prefix.
            harness.submit(PROMPT, NEW_TOKENS, request_id=name, shape=(3, 2, 6), salt=name)
            if name in "ab":
                harness.step()
        harness.run()
    chunks = [call.args[0] for call in passes.call_args_list]
    assert any(len(one) > 1 for one in chunks), "chunks of several prompts must share a pass"
    assert any(not chunk.is_last for one in chunks for chunk in one), "prompts must be cut"
    assert [harness.sink.tokens[name] for name in ("a", "b", "c", "d")] == [tokens] * 4
    assert_bits(logits, rows)


FAMILIES = ["mistral-narrow", "qwen3-bias", "qwen3-moe", "gpt-oss-narrow", "deepseek-v3"]
GENERIC = sorted(generic_models.CASES)[:2]


@pytest.mark.parametrize("case", [*FAMILIES, *GENERIC])
def test_every_family_keeps_its_bits(tmp_path: Path, case: str) -> None:
    """Covers experts, latent attention, windows, sinks and transformers' modules.

    One pass over a prompt must choose the same tokens as several passes.
    """
    models = generic_models if case in GENERIC else family_models
    decoder = load(models.save(case, tmp_path), "cpu", torch.float32)
    ids = [token % decoder.config.vocab_size for token in PROMPT]
    whole = logits_in_chunks(decoder, ids, [len(ids)])
    assert torch.equal(logits_in_chunks(decoder, ids, [1] * len(ids)), whole)
    assert torch.equal(logits_in_chunks(decoder, ids, [3, 4, 1]), whole)


def test_features_are_captured_row_by_row(target_dir: Path) -> None:
    decoder = load(target_dir, DEVICE, torch.float32)
    tokens, _ = plain(decoder, NEW_TOKENS)
    spec = FeatureSpec(feature_size=3 * decoder.config.hidden_size, aux_layer_ids=(1, 2, 4))
    drafter = FakeDrafter(oracle_plan([PROMPT + tokens], VOCAB, 0.8), spec)
    harness = harness_of(decoder, drafter)
    harness.runner.set_feature_spec(spec)
    harness.submit(PROMPT, NEW_TOKENS, request_id="spec", shape=(4, 2, 9))
    harness.run()
    assert harness.sink.tokens["spec"] == tokens


def invariant(path: Path, case: str) -> tuple[Decoder, Decoder]:
    """Return an ordinary decoder, and the one that a GPU uses, run here on the reference kernels."""
    with mock.patch(
        "outrider.shared.nn.layers.linear.can_pack", return_value=False
    ):  # as on a GPU, whose kernels read the weights unpacked, row by row
        decoder = load_decoder(family_models.save(case, path), "cpu", torch.float32)
    return decoder, BatchInvariant(decoder)


@pytest.mark.parametrize("case", ["llama", "mistral-narrow", "qwen2", "qwen3", "qwen3-bias"])
def test_the_decoder_of_a_gpu_computes_the_same_model(tmp_path: Path, case: str) -> None:
    decoder, batch_invariant = invariant(tmp_path, case)
    expected = logits_in_chunks(deterministic(decoder), PROMPT, [8])
    torch.testing.assert_close(
        logits_in_chunks(batch_invariant, PROMPT, [5, 1, 2]), expected, atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize("rows", [1, 16, 21])
def test_the_decoder_of_a_gpu_filters_rows_in_groups_of_one_size(tmp_path: Path, rows: int) -> None:
    decoder, batch_invariant = invariant(tmp_path, "llama")
    hidden = torch.randn(rows, decoder.config.hidden_size, generator=torch.Generator().manual_seed(0))
    column = torch.ones(rows)
    sampling = SamplingTensors(
        column, column.int() * 40, column * 0.9, column * 0, column.long(), column.int() * 0, False, True
    )
    positions = torch.arange(rows)
    assert torch.equal(
        batch_invariant.choose(hidden, sampling, positions),
        deterministic(decoder).choose(hidden, sampling, positions),
    )


@pytest.mark.parametrize("case", ["mixtral", "deepseek-v2"])
def test_a_gpu_refuses_what_has_no_invariant_kernels(tmp_path: Path, case: str) -> None:
    with pytest.raises(ConfigurationError, match="layers of an unsupported kind") as caught:
        invariant(tmp_path, case)
    assert caught.value.field == "deterministic"
