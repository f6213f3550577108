"""Matches the tensors of an EAGLE-3 checkpoint by canonical names; no tensor may be missing or left over.

Canonical names are ``layers.N.*``, ``fc.*``, ``fc_norm.N.weight``, ``input_norm.weight``, ``norm.weight``,
``lm_head.weight``, ``embed_tokens.weight``, ``d2t`` and ``t2d``. In some published heads, the norms
``fc_norm.0``, ``fc_norm.1`` and ``fc_norm.2`` are called ``aux_norm_low``, ``aux_norm_mid`` and
``aux_norm_high``. The module `keys` contains the parts common to all kinds of heads.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from outrider.services.draft.heads.files.eagle3_config import Eagle3Config
from outrider.services.draft.heads.files.eagle3_sizes import check_sizes
from outrider.services.draft.heads.files.hot_vocab import HOT_IDS, take_hot_ids
from outrider.services.draft.heads.files.keys import HeadKeys, canonical_names, layer_shapes
from outrider.services.draft.vocab import DraftVocabulary
from outrider.shared.base.errors import CheckpointError
from outrider.shared.nn.checkpoint.checkpoint_reader import CheckpointReader, TensorShape

LEGACY_FC_NORMS = ("aux_norm_low.weight", "aux_norm_mid.weight", "aux_norm_high.weight")
INTEGERS = ("d2t", "t2d", HOT_IDS)


def resolve(reader: CheckpointReader, config: Eagle3Config) -> HeadKeys:
    """Match the names and shapes of an EAGLE-3 checkpoint's tensors against the head's configuration.

    Raises:
        CheckpointError: A tensor is missing, unexpected or misshaped. The message lists all such tensors in
            the file's spelling.
    """
    stored = canonical_names(reader, _rename)
    check_sizes(reader, config, stored)
    ignored = {f"verifier_{name}.weight": "a copy of the target's tensor" for name in ("norm", "lm_head")}
    shapes = _projector_shapes(config, stored, ignored)
    for index in range(config.layer.num_layers):
        shapes |= _layer_shapes(config, index, stored, ignored)
    shapes |= _vocabulary_shapes(reader, config, stored, ignored)
    return HeadKeys.match(reader, stored, shapes, ignored, INTEGERS, config.layer.head_dim)


def take_vocabulary(
    reader: CheckpointReader, keys: HeadKeys, config: Eagle3Config, token_map: torch.Tensor | None
) -> DraftVocabulary:
    """Return the tokens that an EAGLE-3 head can draft.

    The tensor ``d2t`` has precedence, and is checked against the tensor ``t2d``. Without ``d2t``, the tensor
    ``hot_token_id`` or a token map lists the tokens. Without any of these, the head can draft the target's
    full vocabulary.

    Raises:
        CheckpointError: The tensors contradict each other, or a token map was given although the head has a
            draft vocabulary.
    """
    size = config.layer.vocab_size
    t2d = keys.take_stored(reader, "t2d") if "t2d" in keys else None
    if "d2t" not in keys:
        ids = take_hot_ids(reader, keys, token_map, config.hot_vocab_size, size)
        own_rows = "lm_head.weight" in keys and keys.shapes["lm_head.weight"][0] != size
        # If the lm_head was cut to the frequent tokens, its rows are in the order of `ids`.
        return (
            DraftVocabulary.in_order(ids, size)
            if own_rows and ids is not None
            else DraftVocabulary.from_token_map(ids, size)
        )
    if token_map is not None:
        raise CheckpointError(
            f"{reader.path}: the head has a draft vocabulary of its own (d2t). Leave out "
            "--speculative-token-map.",
            field="speculative_token_map",
        )
    return DraftVocabulary.from_tensors(keys.take_stored(reader, "d2t"), t2d, size)


def take_projector(reader: CheckpointReader, keys: HeadKeys) -> dict[str, torch.Tensor]:
    """Return the projector's tensors by canonical name, in host memory. The target runs the projector."""
    names = [
        name
        for name in keys.shapes
        if name in ("fc.weight", "fc.bias", "input_norm.weight") or name.startswith("fc_norm.")
    ]
    return {name: keys.take(reader, name).to("cpu") for name in names}


def layer_norm_name(keys: HeadKeys, layer: int) -> str:
    """Return the name of the norm that is applied to the input state of an EAGLE-3 head's later layers.

    A later layer is any layer but the first. Most exports name this norm ``hidden_norm``; some name it
    ``input_layernorm``.
    """
    name = f"layers.{layer}.hidden_norm.weight"
    return name if name in keys else f"layers.{layer}.input_layernorm.weight"


def _rename(name: str) -> str:
    return f"fc_norm.{LEGACY_FC_NORMS.index(name)}.weight" if name in LEGACY_FC_NORMS else name


def _projector_shapes(
    config: Eagle3Config, stored: Mapping[str, str], ignored: dict[str, str]
) -> dict[str, TensorShape]:
    """Return the shapes of the projector; add the parts that the configuration disables to `ignored`."""
    hidden, features = config.layer.hidden_size, config.aux.count * config.target_hidden_size
    if config.final_hidden:
        unused = [name for name in stored if name.startswith(("fc.", "fc_norm.", "input_norm."))]
        ignored |= dict.fromkeys(unused, "config.json sets use_aux_hidden_state: false")
        return {}
    shapes: dict[str, TensorShape] = {"fc.weight": (hidden, features)}
    fc_norms = {f"fc_norm.{index}.weight": (config.target_hidden_size,) for index in range(config.aux.count)}
    parts: list[tuple[str, bool | None, dict[str, TensorShape]]] = [
        ("fc_norm", config.fc_norm, fc_norms),  # type: ignore[list-item]
        ("norm_before_fc", config.input_norm, {"input_norm.weight": (features,)}),
        ("bias", config.fc_bias, {"fc.bias": (hidden,)}),
    ]
    for key, wanted, part in parts:
        there = [name for name in stored if name in part]
        if wanted or (wanted is None and there):
            shapes |= part
        else:
            ignored |= dict.fromkeys(there, f'config.json sets "{key}": false')
    return shapes


def _layer_shapes(
    config: Eagle3Config, index: int, stored: Mapping[str, str], ignored: dict[str, str]
) -> dict[str, TensorShape]:
    layer = config.layer
    prefix, norm = f"layers.{index}.", (layer.hidden_size,)
    shapes = layer_shapes(
        layer, index, layer.hidden_size * (1 if index else 2), stored, qkv_bias=config.attention_bias
    )
    embedding_norm, hidden_norm = f"{prefix}input_layernorm.weight", f"{prefix}hidden_norm.weight"
    if index == 0:
        return shapes | {embedding_norm: norm, hidden_norm: norm}
    if hidden_norm not in stored and embedding_norm in stored:
        return shapes | {embedding_norm: norm}
    ignored[embedding_norm] = "only the first layer reads the embedding"
    return shapes | {hidden_norm: norm}


def _vocabulary_shapes(
    reader: CheckpointReader, config: Eagle3Config, stored: Mapping[str, str], ignored: dict[str, str]
) -> dict[str, TensorShape]:
    vocab, hidden = config.layer.vocab_size, config.layer.hidden_size
    shapes: dict[str, TensorShape] = {"norm.weight": (hidden,)}
    if "embed_tokens.weight" in stored:
        shapes["embed_tokens.weight"] = (vocab, hidden)
    if "t2d" in stored:
        shapes["t2d"] = (vocab,)
    draft_vocab = config.draft_vocab_size
    if draft_vocab is None:
        named = next((stored[name] for name in ("d2t", HOT_IDS) if name in stored), None)
        draft_vocab = config.hot_vocab_size or (_rows(reader, named) if named is not None else vocab)
    if HOT_IDS in stored and "d2t" not in stored:
        shapes[HOT_IDS] = (draft_vocab,)
    elif (draft_vocab < vocab and config.hot_vocab_size is None) or "d2t" in stored:
        shapes["d2t"] = (draft_vocab,)
    if "lm_head.weight" in stored:
        if config.borrows_lm_head and "d2t" not in stored:
            ignored["lm_head.weight"] = "draft_vocab_size is null: the target's lm_head is used"
        else:
            rows = _rows(reader, stored["lm_head.weight"])
            shapes["lm_head.weight"] = (vocab if rows == vocab else draft_vocab, hidden)
    return shapes


def _rows(reader: CheckpointReader, name: str) -> int:
    shape = reader.tensors[name].shape
    return shape[0] if shape else 0
