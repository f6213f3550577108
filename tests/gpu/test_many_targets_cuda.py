"""Two targets on two GPUs behind one gateway: every stream of a killed target ends with its tokens."""

from __future__ import annotations

import contextlib
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.services.two_targets import STREAMS, Crowd, TwoTargets

pytestmark = [pytest.mark.multi_gpu, pytest.mark.timeout(600)]


def test_every_stream_of_a_killed_target_ends_with_its_tokens() -> None:
    """With `--deterministic`, the tokens do not depend on the target or the batch."""
    with contextlib.ExitStack() as cleanup:
        flags = [("--device", f"cuda:{index}", "--deterministic") for index in (0, 1)]
        two = TwoTargets(cleanup, *flags)
        undisturbed = two.answers()
        with ThreadPoolExecutor(STREAMS) as pool:
            crowd = Crowd(two, pool)
            assert crowd.all_run.wait(120)
            os.kill(two.targets[0].popen.pid, signal.SIGKILL)
            assert crowd.results() == undisturbed
        assert two.moves() > 0
