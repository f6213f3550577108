"""Toy targets with toy drafts of every kind that drafts on the target's device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from outrider.services.draft.settings import DraftSettings
from outrider.shared.nn.decoder import Decoder
from support.engine.target_harness import load_toy
from support.models import toy_heads, toy_mtp
from support.models.toys import make_toy_eagle3, make_toy_target
from support.suite.compute_device import DEVICE


@dataclass(frozen=True)
class Pair:
    """A target, and the settings of its draft, which is one of `KINDS`."""

    kind: str
    decoder: Decoder
    settings: DraftSettings
    often: bool
    """True if the drafts are accepted often."""


def eagle3(folder: Path) -> tuple[Path, Path]:
    """Save a target and an EAGLE3 head."""
    target = make_toy_target(folder / "target", vocab_size=64, seed=3, planted=3.0, num_layers=3)
    return target, make_toy_eagle3(folder / "head", target, planted=3.0, draft_vocab_size=64)


def eagle(folder: Path) -> tuple[Path, Path]:
    """Save a target and an EAGLE head."""
    target = make_toy_target(
        folder / "target", vocab_size=toy_heads.VOCAB, hidden_size=toy_heads.HIDDEN, seed=3, num_layers=3
    )
    return target, toy_heads.write_head(folder / "head", toy_heads.base_config(), toy_heads.eagle_tensors())


def standalone(folder: Path) -> tuple[Path, Path]:
    """Save a target and a smaller model."""
    target = make_toy_target(folder / "target", vocab_size=64, seed=3, planted=2.5, num_layers=3)
    return target, make_toy_target(
        folder / "small", vocab_size=64, num_layers=2, head_dim=8, seed=9, planted=2.5
    )


def mtp(folder: Path, layers: int = 2) -> tuple[Path, Path]:
    """Save a trained target with MTP layers, and return its folder for both."""
    target = toy_mtp.save(_trained_mtp(layers), folder / "target")
    return target, target


@cache
def _trained_mtp(layers: int) -> toy_mtp.Model:
    return toy_mtp.train(layers=1, mtp_layers=layers, steps=60)


KINDS: dict[str, Callable[[Path], tuple[Path, Path]]] = {
    "EAGLE3": eagle3,
    "EAGLE": eagle,
    "STANDALONE": standalone,
    "MTP": mtp,
    "MTP with one layer": partial(mtp, layers=1),
}


def make_pair(kind: str, folder: Path, **settings: object) -> Pair:
    """Save and load a pair of one of `KINDS`. `settings` replace the draft's settings."""
    target, draft = KINDS[kind](folder)
    where = {"device": str(DEVICE), "threads": 1, "kv_tokens": 8192}
    given = {"draft": draft, "target_weights": target, "speculative_algorithm": kind.split()[0]}
    return Pair(kind, load_toy(target), DraftSettings.load({**given, **where, **settings}), kind != "EAGLE")
