"""`outrider up` with draft models, n-grams and MTP layers: drafts are accepted, and the text is unchanged."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from support.models import toy_mtp
from support.services.gateway_client import Result
from support.services.stack import DEMO_TARGET, PROMPTS, START_TIMEOUT_S, Stack, supervised

from outrider.common.v1 import common_pb2

ON, OFF = common_pb2.SPECULATION_MODE_ON, common_pb2.SPECULATION_MODE_OFF
REPEATING = [*range(40, 52)] * 4

Ask = Callable[[Stack, int], Result]


def chats(stack: Stack, mode: int, prompts: Sequence[str] = PROMPTS[:2]) -> list[Result]:
    return [stack.client.chat(prompt, mode=mode, max_tokens=48, trace=True) for prompt in prompts]


def accepted(results: Sequence[Result]) -> int:
    return sum(len(one.accepted) for result in results for one in result.rounds)


def until_drafted(tokens: Sequence[int]) -> Callable[[Stack], None]:
    """Return a function that waits until a completion of `tokens` is served with drafts."""

    def wait(stack: Stack) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if any(
                len(one.nodes) > 1 for one in stack.client.complete(tokens, mode=ON, max_tokens=16).rounds
            ):
                return
        raise AssertionError(f"not drafting; draft state {stack.stats().draft_state}")

    return wait


def test_a_standalone_model_drafts() -> None:
    """The target is its own draft, so nearly all tokens are accepted."""
    draft = ("--draft", str(DEMO_TARGET), "--speculative-algorithm", "STANDALONE")
    with supervised("--target", str(DEMO_TARGET), *draft) as stack:
        plain, drafted = chats(stack, OFF), chats(stack, ON)
        assert [result.text for result in drafted] == [result.text for result in plain]
        assert [result.token_ids for result in drafted] == [result.token_ids for result in plain]
        assert accepted(plain) == 0
        assert accepted(drafted) > 48
        assert accepted(drafted) > 2 * sum(len(result.rounds) for result in drafted)
        stack.assert_no_page_held()


def test_n_grams_draft() -> None:
    arguments = ("--draft", "none", "--speculative-algorithm", "NGRAM")
    with supervised("--target", str(DEMO_TARGET), *arguments, until=until_drafted(REPEATING)) as stack:
        plain, drafted = (stack.client.complete(REPEATING, mode=mode, max_tokens=64) for mode in (OFF, ON))
        assert drafted.token_ids == plain.token_ids
        assert drafted.text == plain.text
        assert accepted([plain]) == 0
        assert accepted([drafted]) > 0
        stack.assert_no_page_held()


@pytest.mark.parametrize("transport", ["grpc", "inproc"])
def test_the_mtp_layers_of_a_checkpoint_draft(transport: str, tmp_path: Path) -> None:
    model = toy_mtp.train(layers=1, mtp_layers=2, steps=60)
    folder = toy_mtp.save(model, tmp_path / "mimo")
    prompt = toy_mtp.sample_text(1, 12, torch.Generator().manual_seed(3))[0].tolist()
    arguments = (
        "--target",
        str(folder),
        "--draft",
        "none",
        "--speculative-algorithm",
        "MTP",
        "--skip-tokenizer",
        "--transport",
        transport,
    )
    with supervised(*arguments, until=until_drafted(prompt)) as stack:
        plain, drafted = (stack.client.complete(prompt, mode=mode, max_tokens=48) for mode in (OFF, ON))
        assert drafted.token_ids == plain.token_ids == model.greedy(prompt, 48)
        assert accepted([drafted]) > 16
