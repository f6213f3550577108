"""Tests of the embedded pair served on a GPU, with default settings (bf16) and with `--deterministic`.

These tests have their own file because a running stack uses most of the GPU's memory.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from support.services.stack import PROMPTS, Stack, supervised

from outrider.common.v1 import common_pb2

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

ON, OFF = common_pb2.SPECULATION_MODE_ON, common_pb2.SPECULATION_MODE_OFF


def test_bf16_answers_and_drafts() -> None:
    with supervised("--dtype", "bfloat16", device="cuda") as stack:
        result = stack.client.chat(PROMPTS[0], mode=ON, max_tokens=64)
        print(result.text)
        assert "capital" in result.text
        assert result.finished
        assert result.finished.speculation.accept_length > 2
        stack.assert_no_page_held()


def tokens(stack: Stack, mode: int, temperature: float, together: int) -> list[list[int]]:
    """Return the answers to all prompts, sent `together` at a time."""
    with ThreadPoolExecutor(together) as pool:
        chat = partial(stack.client.chat, mode=mode, temperature=temperature, max_tokens=96)
        return [
            result.token_ids
            for result in pool.map(lambda item: chat(item[1], seed=item[0]), enumerate(PROMPTS))
        ]


def test_deterministic_text_is_equal_in_bf16() -> None:
    """Every token is equal with and without speculation, alone and batched. Near-ties are no excuse."""
    with supervised("--dtype", "bfloat16", "--deterministic", "--kv-tokens", "65536", device="cuda") as stack:
        for temperature in (0.0, 1.0):
            alone = tokens(stack, OFF, temperature, 1)
            assert tokens(stack, ON, temperature, 1) == alone
            assert tokens(stack, ON, temperature, len(PROMPTS)) == alone
            assert tokens(stack, OFF, temperature, len(PROMPTS)) == alone
        stack.assert_no_page_held()
