"""Sessions of several MTP layers that begin with stored rows: their trees are those of a plain reference."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.drafts.session_table import fence_of
from support.models.toy_mtp import Model, sample_text, save, sharp_model
from support.suite.compute_device import DEVICE

from outrider.services.draft.build import build_engine
from outrider.services.draft.growth.draft_graph import DraftGraph
from outrider.services.draft.sessions.session import Ask, PeerId
from outrider.services.draft.settings import DraftSettings
from outrider.shared.spec.drafter import Commit, SequenceOpen
from outrider.shared.spec.tree import DraftShape

torch.set_num_threads(1)
PAGE = 4
PEER, SHAPE = PeerId(1), DraftShape(5, 2, 12)
TEXT, OTHER = sample_text(2, 40, torch.Generator().manual_seed(1)).tolist()


class Draft:
    """A draft engine, and the features that a target would send to it.

    With `in_one_go`, one launch adds the last rows of a session and grows its tree, as on a GPU.
    """

    def __init__(self, model: Model, folder: Path, *, in_one_go: bool) -> None:
        settings = DraftSettings.load(
            {"target_weights": folder, "device": str(DEVICE), "kv_tokens": 2048, "page_size": PAGE}
        )
        self.model = model
        self.engine = build_engine(settings, DEVICE, torch.float32)
        self.in_one_go = in_one_go
        growth = self.engine.strategy.growth
        assert growth is not None
        host = DraftGraph(
            growth.memory, growth.graphs.cache, self.engine.strategy.info.feature_size, torch.float32
        )
        self.engine.strategy.growth = replace(growth, host=host if in_one_go else None)
        self._lens: dict[int, int] = {}

    def open(self, session_id: int, tokens: list[int], epoch: int = 1) -> int:
        """Open a session, send the features that it lacks, and return the number of rows that it had."""
        opening = SequenceOpen(
            fence_of(tokens, session_id, epoch), tokens, 0, 0.0, cache_salt="", stored_len=len(tokens)
        )
        held = self.engine.open(PEER, opening).have_len
        rows = self.model.hidden(torch.tensor([tokens]))[0].detach()[held : len(tokens) - 1]
        self.engine.add_features(PEER, session_id, epoch, held, rows)
        self._lens[session_id] = len(tokens)
        if not self.in_one_go:
            self.engine.step()
        return held

    def error(self, session_id: int, tokens: list[int], epoch: int = 1) -> float:
        """Grow a tree after these tokens, and return the largest error of a node's log-prob."""
        base = self._lens[session_id]
        features = self.model.hidden(torch.tensor([tokens]))[0].detach()[base - 1 : len(tokens) - 1]
        commit = Commit(
            fence_of(tokens, session_id, epoch), base, tokens[base:], features if len(features) else None
        )
        self.engine.commit(PEER, commit, Ask(1, SHAPE, 0.0))
        self._lens[session_id] = len(tokens)
        (proposal,) = self.engine.step().proposals
        trees = proposal.trees
        assert trees.logprobs is not None
        assert int(trees.depths[0].max()) >= 4
        paths: list[list[int]] = [[]]
        worst = 0.0
        for node in range(1, int(trees.num_nodes[0])):
            paths.append([*paths[int(trees.parents[0, node])], int(trees.tokens[0, node])])
            _, expected = self.model.draft(tokens, len(paths[node]), paths[node])
            worst = max(worst, abs(expected[-1] - float(trees.logprobs[0, node])))
        self.engine.check()
        return worst


def complete_pages(tokens: int, layers: int) -> int:
    """Return the number of rows in full pages that depend on this many tokens only."""
    return (tokens - layers) // PAGE * PAGE


@pytest.mark.parametrize("in_one_go", [False, True])
@pytest.mark.parametrize("layers", [2, 3])
def test_sessions_that_share_rows_draft_as_sessions_of_their_own(
    tmp_path: Path, layers: int, in_one_go: bool
) -> None:
    model = sharp_model(layers)
    draft = Draft(model, save(model, tmp_path), in_one_go=in_one_go)
    assert draft.open(1, TEXT[:22]) == 0
    assert draft.error(1, TEXT[:22]) < 1e-4
    # The second session begins with rows of the first, which is still running. Both go on in turn.
    second = [*TEXT[:19], *OTHER[19:]]
    assert draft.open(2, second[:21]) == complete_pages(19, layers)
    for length in (22, 24, 25, 28):
        assert draft.error(2, second[:length]) < 1e-4
        assert draft.error(1, TEXT[: length + 2]) < 1e-4
    # The rows that remain after the end of both sessions are right too.
    draft.engine.close(PEER, 1)
    draft.engine.close(PEER, 2)
    for number, tokens in enumerate((TEXT[:27], second[:27]), 3):
        assert draft.open(number, tokens) == complete_pages(26, layers)
        assert draft.error(number, tokens) < 1e-4


@pytest.mark.parametrize("in_one_go", [False, True])
@pytest.mark.parametrize("length", [17, 18, 19, 20, 24])
def test_a_session_that_begins_again_drafts_from_its_new_tokens(
    tmp_path: Path, length: int, in_one_go: bool
) -> None:
    """The session may lack so few rows that one launch could add them."""
    model = sharp_model(3)
    draft = Draft(model, save(model, tmp_path), in_one_go=in_one_go)
    draft.open(1, TEXT[:24])
    assert draft.error(1, TEXT[:26]) < 1e-4
    tokens = [*TEXT[:17], *OTHER[17:length]]
    assert draft.open(1, tokens, epoch=2) == complete_pages(16 if length == 17 else 17, 3)
    assert draft.error(1, tokens, epoch=2) < 1e-4
