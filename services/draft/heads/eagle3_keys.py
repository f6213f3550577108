"""The tensor names of EAGLE-3 checkpoints: several dialects, one strict reading.

Canonical names are ``layers.0.*``, ``fc.*``, ``fc_norm.N.weight``, ``input_norm.weight``, ``norm.weight``, ``lm_head.weight``,
``embed_tokens.weight``, ``d2t``, ``t2d``. Seen in the wild: ``midlayer.*``, a ``model.`` prefix, ``aux_norm_low|mid|high``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from outrider.services.draft.heads.eagle3_config import Eagle3Config
from outrider.services.draft.heads.eagle3_sizes import check_sizes
from outrider.services.draft.vocab import DraftVocabulary
from outrider.shared.base.errors import CheckpointError
from outrider.shared.nn.layers import Linear
from outrider.shared.nn.loader import CheckpointReader, Shape

LEGACY_FC_NORMS = ("aux_norm_low.weight", "aux_norm_mid.weight", "aux_norm_high.weight")
IGNORED = ("*rotary_emb.inv_freq",)
PROJECTOR = ("fc.weight", "fc.bias", "input_norm.weight")


@dataclass(frozen=True, slots=True)
class Eagle3Keys:
    """Where a checkpoint keeps what.

    Attributes:
        actual: Canonical name → name in the file, of every tensor in it.
        shapes: Canonical name → shape, of every tensor that is read.
        dialect: How the layer is called in this file (``midlayer.``, ``layers.0.``, ``model.layers.0.``), for the log.
        ignored: Names in the file that are not read.
        vocab_size: The target's vocabulary.
    """

    actual: dict[str, str]
    shapes: dict[str, Shape]
    dialect: str
    ignored: tuple[str, ...]
    vocab_size: int

    @classmethod
    def resolve(cls, reader: CheckpointReader, config: Eagle3Config) -> Eagle3Keys:
        """Match a file's names and shapes with what the configuration says.

        Raises:
            CheckpointError: names every missing, unexpected and misshaped tensor as the file spells it.
        """
        dialect = _dialect(reader)
        actual: dict[str, str] = {}
        for name in reader.names:
            known = actual.setdefault(_canonical(name), name)
            if known != name:
                raise CheckpointError(f"{reader.path}: {known} and {name} are the same tensor; keep one.", field=name)
        check_sizes(reader, config, actual)
        shapes = _expected_shapes(reader, config, actual)
        spelled = {actual.get(name) or name.replace("layers.0.", dialect): shape for name, shape in shapes.items()}
        ignored = tuple(name for name in reader.names if _canonical(name).endswith(IGNORED[0][1:]))
        integers = {actual[name] for name in ("d2t", "t2d") if name in actual}
        weights = {name: shape for name, shape in spelled.items() if name not in integers}
        reader.check(weights, ignored=(*ignored, *integers))
        return cls({name: actual.get(name, name) for name in shapes}, shapes, dialect, ignored, config.layer.vocab_size)

    def named(self, name: str) -> tuple[str, Shape]:
        """Return a canonical name's own name in the file and its shape."""
        return self.actual[name], self.shapes[name]

    def take_vocabulary(self, reader: CheckpointReader) -> DraftVocabulary:
        """Read ``d2t`` (and compare ``t2d``), or return the identity."""
        t2d = _take_stored(reader, *self.named("t2d")) if "t2d" in self.shapes else None
        if "d2t" not in self.shapes:
            return DraftVocabulary.identity(self.vocab_size)
        return DraftVocabulary.from_tensors(_take_stored(reader, *self.named("d2t")), t2d, self.vocab_size)

    def take_projector(self, reader: CheckpointReader) -> dict[str, torch.Tensor]:
        """Read what the target applies, under canonical names, on the host."""
        names = [name for name in self.shapes if name in PROJECTOR or name.startswith("fc_norm.")]
        return {name: reader.take(*self.named(name)).to("cpu") for name in names}

    def take_embedding(self, reader: CheckpointReader) -> torch.Tensor | None:
        """Read the head's own embedding, if it has one."""
        return reader.take(*self.named("embed_tokens.weight")) if "embed_tokens.weight" in self.shapes else None

    def take_lm_head(self, reader: CheckpointReader, vocabulary: DraftVocabulary) -> Linear | None:
        """Read the head's own lm_head, if it has one; of a full one only the draft vocabulary's rows are kept."""
        if "lm_head.weight" not in self.shapes:
            return None
        weight = reader.take(*self.named("lm_head.weight"))
        if weight.shape[0] != vocabulary.size:
            weight = weight[vocabulary.target_ids(weight.device)]
        return Linear(weight)


def _canonical(name: str) -> str:
    name = name.removeprefix("model.")
    if name.startswith("midlayer."):
        return "layers.0." + name.removeprefix("midlayer.")
    if name in LEGACY_FC_NORMS:
        return f"fc_norm.{LEGACY_FC_NORMS.index(name)}.weight"
    return name


def _dialect(reader: CheckpointReader) -> str:
    prefixes = ("midlayer.", "layers.0.", "model.layers.0.", "model.midlayer.")
    return next((prefix for prefix in prefixes if any(name.startswith(prefix) for name in reader.names)), prefixes[0])


def _expected_shapes(reader: CheckpointReader, config: Eagle3Config, actual: dict[str, str]) -> dict[str, Shape]:
    """Return canonical names and shapes of everything that must be in the file, given what optional tensors it holds."""
    layer = config.layer
    hidden, inner = layer.hidden_size, layer.intermediate_size
    queries, keys = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
    features = config.num_aux * config.target_hidden_size
    shapes: dict[str, Shape] = {
        "fc.weight": (hidden, features),
        "layers.0.self_attn.q_proj.weight": (queries, 2 * hidden),
        "layers.0.self_attn.k_proj.weight": (keys, 2 * hidden),
        "layers.0.self_attn.v_proj.weight": (keys, 2 * hidden),
        "layers.0.self_attn.o_proj.weight": (hidden, queries),
        "layers.0.mlp.gate_proj.weight": (inner, hidden),
        "layers.0.mlp.up_proj.weight": (inner, hidden),
        "layers.0.mlp.down_proj.weight": (hidden, inner),
        "layers.0.hidden_norm.weight": (hidden,),
        "layers.0.input_layernorm.weight": (hidden,),
        "layers.0.post_attention_layernorm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    fc_norms = {f"fc_norm.{index}.weight": (config.target_hidden_size,) for index in range(config.num_aux)}
    if any(name.startswith("fc_norm.") for name in actual):
        shapes |= fc_norms
    optional: dict[str, Shape] = {
        "fc.bias": (hidden,),
        "input_norm.weight": (features,),
        "embed_tokens.weight": (layer.vocab_size, hidden),
        "t2d": (layer.vocab_size,),
    }
    shapes |= {name: shape for name, shape in optional.items() if name in actual}
    draft_vocab = _draft_vocab_size(reader, config, actual)
    if draft_vocab < layer.vocab_size or "d2t" in actual:
        shapes["d2t"] = (draft_vocab,)
    if "lm_head.weight" in actual:
        rows = reader.tensors[actual["lm_head.weight"]].shape[0]
        shapes["lm_head.weight"] = (rows if rows == layer.vocab_size else draft_vocab, hidden)
    return shapes


def _draft_vocab_size(reader: CheckpointReader, config: Eagle3Config, actual: dict[str, str]) -> int:
    if config.draft_vocab_size is not None:
        return config.draft_vocab_size
    return reader.tensors[actual["d2t"]].shape[0] if "d2t" in actual else config.layer.vocab_size


def _take_stored(reader: CheckpointReader, name: str, shape: Shape) -> torch.Tensor:
    """Read an index or mask tensor as it is stored."""
    stored = reader.tensors[name].dtype
    if stored.is_floating_point:
        raise CheckpointError(f"{reader.path}: {name} is {stored}, must hold integers; export the head again.", field=name)
    return reader.take(name, shape, dtype=stored)
