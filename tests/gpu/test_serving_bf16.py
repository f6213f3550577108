"""The embedded pair as it is served by default on a GPU: bf16, the draft in the target's process. In a file of its own, because a
running stack holds most of the GPU's memory until its module ends."""

from __future__ import annotations

import pytest
from stack import PROMPTS, supervised

from outrider.common.v1 import common_pb2

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


def test_bf16_answers_and_drafts() -> None:
    with supervised("--dtype", "bfloat16", device="cuda") as stack:
        result = stack.client.chat(PROMPTS[0], mode=common_pb2.SPECULATION_MODE_ON, max_tokens=64)
        print(result.text)
        assert "capital" in result.text
        assert result.finished
        assert result.finished.speculation.accept_length > 2
        stack.assert_no_page_held()
