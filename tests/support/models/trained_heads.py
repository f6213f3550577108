"""Trains a tiny target and EAGLE heads in seconds, and measures their accept length with a plain drafter.

The models learn a language of three rules. The first token of a text names its rule. After 0 or 1, the text
walks along one of two fixed permutations. After 2, a random motif repeats. To draft a walk, a head needs the
features, which encode the rule. To draft a motif, it needs exact positions.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from outrider.services.draft.inproc import drafter_beside
from outrider.services.draft.settings import DraftSettings
from support.engine.target_harness import load_toy, make_harness
from support.models.draft_reference import reference_tree
from support.models.plain_heads import PlainHead, train
from support.suite.compute_device import DEVICE

VOCAB, HIDDEN, LAYERS = 48, 48, 5
FIRST = 3
"""Lowest token that is not the name of a rule."""
PERIOD = 5
LENGTH, BATCH, BATCHES = 28, 24, 80
SIZES = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12, "intermediate_size": 96}
AUX = [1, 2, 3]
DRAFT_VOCAB = 44
TOKEN_MAP = tuple(range(FIRST, VOCAB - 2))
"""A reduced vocabulary for FR-Spec, without the names of the rules and two frequent tokens."""


@dataclass(frozen=True)
class TrainedTarget:
    """The target on disk, and its outputs as computed by `transformers`."""

    folder: Path
    model: Any
    tensors: Mapping[str, torch.Tensor] = field(repr=False)
    known: dict[tuple[int, ...], list[int]] = field(default_factory=dict, repr=False)

    @torch.no_grad()
    def states(self, tokens: torch.Tensor, aux: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the captured states and the logits.

        The states are the outputs of the layers `aux`, concatenated. If `aux` is empty, they are the last
        hidden state after the norm.
        """
        output = self.model(input_ids=tokens, output_hidden_states=True)
        hidden = output.hidden_states  # the input of every layer, then the normed output of the last layer
        return (torch.cat([hidden[layer + 1] for layer in aux], -1) if aux else hidden[-1]), output.logits

    @torch.no_grad()
    def continue_greedily(self, prompt: Sequence[int], count: int) -> list[int]:
        """Return the prompt followed by its greedy continuation of `count` tokens."""
        tokens = self.known.setdefault(tuple(prompt), list(prompt))
        while len(tokens) < len(prompt) + count:
            tokens.append(int(self.model(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
        return tokens[: len(prompt) + count]


def sentences(count: int, length: int, seed: int) -> torch.Tensor:
    """Return ``[count, length]`` tokens of the language. The rules alternate from row to row."""
    generator = torch.Generator().manual_seed(seed)
    size = VOCAB - FIRST
    rules = [
        torch.randperm(size, generator=torch.Generator().manual_seed(100 + rule)) + FIRST for rule in range(2)
    ]
    out = torch.zeros(count, length, dtype=torch.long)
    for row in range(count):
        rule = row % 3
        out[row, 0] = rule
        if rule == 2:
            out[row, 1:] = torch.randint(FIRST, VOCAB, (PERIOD,), generator=generator).repeat(length)[
                : length - 1
            ]
            continue
        token = int(torch.randint(FIRST, VOCAB, (1,), generator=generator))
        for position in range(1, length):
            out[row, position] = token
            token = int(rules[rule][token - FIRST])
    return out


@cache
def workplace() -> Path:
    """Return a folder that exists as long as the test process runs."""
    holder = tempfile.TemporaryDirectory(prefix="trained-heads-")
    _HOLDERS.append(holder)
    return Path(holder.name)


_HOLDERS: list[tempfile.TemporaryDirectory[str]] = []


@cache
def trained_target() -> TrainedTarget:
    """Train the target and save it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        rms_norm_eps=1e-5,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
        **SIZES,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    steps = 240
    optimiser = torch.optim.Adam(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 4e-3, total_steps=steps)
    batches = training_rows()
    for step in range(steps):
        rows = batches[step % BATCHES]
        logits = model(input_ids=rows).logits[:, 1:-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 2:].flatten())
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
    folder = workplace() / "target"
    model.eval().save_pretrained(str(folder))
    return TrainedTarget(
        folder, model, {name: tensor.detach() for name, tensor in model.state_dict().items()}
    )


def training_rows() -> torch.Tensor:
    """Return the training texts, ``[batches, batch, length]``."""
    return sentences(BATCHES * BATCH, LENGTH, seed=0).view(BATCHES, BATCH, LENGTH)


@cache
def eagle2() -> Path:
    """Train a head for EAGLE-1 and EAGLE-2, which have the same network, and return the head's folder."""
    weights = _first_weights(is_eagle3=False)
    return _train("eagle2", weights, _config("LlamaForCausalLMEagle"), [])


@cache
def eagle3() -> Path:
    """Train an EAGLE-3 head with a draft vocabulary, and return the head's folder."""
    weights = _first_weights(is_eagle3=True, rows=DRAFT_VOCAB)
    kept = torch.arange(FIRST - 1, FIRST - 1 + DRAFT_VOCAB)
    weights["d2t"] = kept - torch.arange(DRAFT_VOCAB)
    weights["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, kept, True)
    config = _config("LlamaForCausalLMEagle3", draft_vocab_size=DRAFT_VOCAB)
    return _train(
        "eagle3", weights, config | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": AUX}}, AUX
    )


@cache
def eagle3_deep() -> Path:
    """Train a two-layer EAGLE-3 head, and return the head's folder.

    The head reads four layers through fc_norms and borrows the target's lm_head.
    """
    aux = [0, 1, 2, 3]
    weights = _first_weights(is_eagle3=True, layers=2, num_aux=4)
    del weights["lm_head.weight"]
    config = _config(
        "LlamaForCausalLMEagle3",
        num_hidden_layers=2,
        draft_vocab_size=None,
        num_aux_hidden_states=4,
        fc_norm=True,
    )
    return _train("eagle3-deep", weights, config | {"eagle_aux_hidden_state_layer_ids": aux}, aux)


def prompts(count: int = 9, seed: int = 77) -> list[list[int]]:
    """Return prompts that are not in the training texts: a few tokens of a walk, or one and a half motifs."""
    return [row[: 4 if row[0] < 2 else 2 + PERIOD + 2] for row in sentences(count, LENGTH, seed).tolist()]


def plain_accept_length(
    head: PlainHead,
    target: TrainedTarget,
    aux: Sequence[int],
    shape: tuple[int, int, int],
    starts: Sequence[Sequence[int]],
    count: int,
) -> float:
    """Return the tokens per round of the plain drafter.

    The drafter's trees are verified against the target's greedy text, and the features of accepted tokens are
    always exact.
    """
    tokens_out = rounds = 0
    for start in starts:
        text = target.continue_greedily(start, count + shape[0] + 1)
        features = head.project(target.states(torch.tensor([text]), aux)[0][0].to(head.dtype))
        length = len(start) + 1  # the first token comes from the prefill
        while length < len(start) + count:
            tree = reference_tree(head, text[:length], features[: length - 1], *shape)  # type: ignore[arg-type]
            accepted = 0
            while tuple(text[length : length + accepted + 1]) in tree.scores:
                accepted += 1
            length += accepted + 1
            tokens_out += accepted + 1
            rounds += 1
    return tokens_out / rounds


def _config(architecture: str, **more: Any) -> dict[str, Any]:
    sizes = {
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-5,
        **SIZES,
    }
    return {"architectures": [architecture], "model_type": "llama", **sizes, **more}


def _first_weights(
    *, is_eagle3: bool, layers: int = 1, num_aux: int = 3, rows: int = VOCAB
) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def matrix(out: int, width: int) -> torch.Tensor:
        return torch.randn(out, width, generator=generator) / width**0.5

    def ones(width: int = HIDDEN) -> torch.Tensor:
        return torch.ones(width)

    inner, queries, keys = SIZES["intermediate_size"], 4 * SIZES["head_dim"], 2 * SIZES["head_dim"]
    weights = {"fc.weight": matrix(HIDDEN, num_aux * HIDDEN if is_eagle3 else 2 * HIDDEN)}
    if is_eagle3:
        weights |= {"norm.weight": ones(), "lm_head.weight": matrix(rows, HIDDEN)}
    else:
        weights["fc.bias"] = torch.zeros(HIDDEN)
    if num_aux > 3:
        weights |= {f"fc_norm.{index}.weight": ones() for index in range(num_aux)}
    for layer in range(layers):
        prefix = f"layers.{layer}."
        width = 2 * HIDDEN if is_eagle3 and layer == 0 else HIDDEN
        for part, out in (("q", queries), ("k", keys), ("v", keys)):
            weights[f"{prefix}self_attn.{part}_proj.weight"] = matrix(out, width)
        weights[f"{prefix}self_attn.o_proj.weight"] = matrix(HIDDEN, queries)
        for part in ("gate", "up"):
            weights[f"{prefix}mlp.{part}_proj.weight"] = matrix(inner, HIDDEN)
        weights[f"{prefix}mlp.down_proj.weight"] = matrix(HIDDEN, inner)
        weights[f"{prefix}post_attention_layernorm.weight"] = ones()
        if is_eagle3:
            weights[f"{prefix}hidden_norm.weight"] = ones()
        if is_eagle3 and layer == 0:
            weights[f"{prefix}input_layernorm.weight"] = ones()
    return weights


def _train(name: str, weights: dict[str, torch.Tensor], config: dict[str, Any], aux: Sequence[int]) -> Path:
    torch.set_num_threads(1)
    target = trained_target()
    for tensor in weights.values():
        if tensor.is_floating_point():
            tensor.requires_grad_(True)
    head = PlainHead(
        config, weights, target.tensors["model.embed_tokens.weight"], target.tensors["lm_head.weight"]
    )
    rows = training_rows()
    states, labels = zip(*(target.states(batch, aux) for batch in rows), strict=True)
    train(head, rows, torch.stack(states), torch.stack(labels), depth=3, rate=6e-3, steps=180)
    folder = workplace() / name
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {key: tensor.detach().contiguous() for key, tensor in weights.items()},
        str(folder / "model.safetensors"),
    )
    return folder


def served_accept_length(
    folder: Path,
    target: TrainedTarget,
    shape: tuple[int, int, int],
    starts: Sequence[Sequence[int]],
    count: int,
    **settings: Any,
) -> float:
    """Return the tokens per round of the real engine with the in-process drafter.

    The engine's rounds are counted as in `plain_accept_length`.
    """
    decoder = load_toy(target.folder)
    given = {"draft": folder, "device": str(DEVICE), "kv_tokens": 4096, **settings}
    drafter = drafter_beside(decoder, DraftSettings.load(given))
    harness = make_harness(decoder, drafter)
    for index, start in enumerate(starts):
        harness.submit(start, count + shape[0] + 1, request_id=str(index), shape=shape, trace=True)
    harness.run()
    emitted: list[int] = []
    for index, start in enumerate(starts):
        assert (
            harness.sink.tokens[str(index)]
            == target.continue_greedily(start, count + shape[0] + 1)[len(start) :]
        )
        emitted += [
            len(round_.emitted)
            for round_ in harness.sink.rounds[str(index)]
            if round_.base_len < len(start) + count
        ]
    return sum(emitted) / len(emitted)
