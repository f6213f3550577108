"""Strictly matches a draft head's tensors against its configuration, and reads them by canonical name.

Canonical names are ``layers.N.*``, ``fc.*``, ``norm.weight``, ``lm_head.weight`` and ``embed_tokens.weight``.
Published files also use ``midlayer.*`` for ``layers.0.*``, Mistral's own names, and a ``model.`` prefix
before any name. The module also dequantises FP8 matrices. It reorders q and k if they are in Mistral's order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod

import torch

from outrider.services.draft.heads.files.head_config import HeadConfig
from outrider.services.draft.heads.files.latent import latent_shapes, take_latent_attention
from outrider.services.draft.heads.files.mistral_format import ACTIVATION_SCALES, SCALE, halves, is_native
from outrider.services.draft.heads.files.mistral_format import rename as native_rename
from outrider.services.draft.heads.files.mistral_format import spell as native_spell
from outrider.shared.base.errors import CheckpointError
from outrider.shared.nn.checkpoint.checkpoint_reader import CheckpointReader, TensorShape
from outrider.shared.nn.checkpoint.fp8_source import STORED as FP8
from outrider.shared.nn.layers.modules import Attention, AttentionBlock, GatedMLP, HeadNorm, Linear, RMSNorm

FIRST_LAYER = "layers.0."
DIALECTS = ("midlayer.", "layers.0.", "model.layers.0.", "model.midlayer.")
NATIVE = "layers.0.attention."
"""Spelling of layer 0 in Mistral's own format."""
TURNED = ("self_attn.q_proj.weight", "self_attn.k_proj.weight")
"""Name suffixes of the matrices whose output the rotary embedding rotates."""
ROTARY_BUFFER = "rotary_emb.inv_freq"


@dataclass(frozen=True, slots=True)
class HeadKeys:
    """The tensors to read from a draft head's checkpoint, by canonical name.

    Attributes:
        actual: Maps the canonical name of each tensor to read to the tensor's name in the file.
        shapes: Maps the canonical name of each tensor to read to the tensor's shape.
        dialect: Prefix of the first layer's tensors in this file, for the log: ``midlayer.``, ``layers.0.``
            or ``model.layers.0.``.
        ignored: Reason for each tensor that is not read, by the tensor's name in the file.
        pairs: Width of an attention head in Mistral's format, whose rotary embedding rotates adjacent pairs
            of dimensions. 0 in other formats, whose rotary embedding rotates halves.
        scales: For each FP8 matrix, by canonical name: the name of its scale in the file.
    """

    actual: Mapping[str, str]
    shapes: Mapping[str, TensorShape]
    dialect: str
    ignored: Mapping[str, str]
    pairs: int = 0
    scales: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def match(
        cls,
        reader: CheckpointReader,
        stored: Mapping[str, str],
        shapes: Mapping[str, TensorShape],
        ignored: Mapping[str, str],
        integers: Sequence[str] = (),
        head_dim: int = 0,
    ) -> HeadKeys:
        """Match the tensors of a draft head's checkpoint with the expected ones, and return those to read.

        Args:
            reader: Reader of the checkpoint.
            stored: For each tensor of the file, maps its canonical name to its name in the file; see
                `canonical_names`.
            shapes: For each tensor that must exist, maps its canonical name to its shape.
            ignored: For each tensor that may exist but is not read, maps its canonical name to the reason.
            integers: Canonical names of index and mask tensors.
            head_dim: Width of an attention head, for files whose rotary embedding rotates pairs of
                dimensions.

        Raises:
            CheckpointError: A tensor is missing, unexpected or misshaped. The message lists all such
                tensors in the file's spelling.
        """
        # 1. Collect the tensors that may be skipped, each with its reason.
        dialect = _dialect(reader)
        spelled = {stored.get(name) or _spell(name, dialect): shape for name, shape in shapes.items()}
        skipped = {actual: ignored[name] for name, actual in stored.items() if name in ignored}
        skipped |= {
            actual: "computed from the configuration"
            for name, actual in stored.items()
            if name.endswith(ROTARY_BUFFER)
        }
        whole = {stored[name] for name in integers if name in stored}
        skipped |= {
            actual: "activations are not quantised here"
            for name, actual in stored.items()
            if ACTIVATION_SCALES.search(name)
        }
        scales = _scales(reader, stored, shapes)
        skipped |= dict.fromkeys(scales.values(), "multiplied into its matrix")
        # 2. All other tensors must match exactly. Index and mask tensors are checked when they are read.
        weights = {name: shape for name, shape in spelled.items() if name not in whole}
        reader.check(weights, ignored=(*skipped, *whole), dtypes={stored[name]: FP8 for name in scales})
        pairs = head_dim if is_native(reader.names) else 0
        return cls(
            {name: stored.get(name, name) for name in shapes}, dict(shapes), dialect, skipped, pairs, scales
        )

    def __contains__(self, name: str) -> bool:
        return name in self.shapes

    def named(self, name: str) -> tuple[str, TensorShape]:
        """Return the name in the file and the shape of the tensor with this canonical name."""
        return self.actual[name], self.shapes[name]

    def take(self, reader: CheckpointReader, name: str) -> torch.Tensor:
        """Read one tensor, dequantised and reordered for computation."""
        if name not in self.scales:
            return self.adapt(name, reader.take(*self.named(name)), None)
        scale = read_scale(reader, self.scales[name]).to(reader.device)
        return self.adapt(name, reader.take(*self.named(name), dtype=FP8), scale).to(
            reader.dtype or torch.float32
        )

    def adapt(self, name: str, tensor: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        """Convert a tensor of a head's checkpoint to the values and row order that the head computes with.

        An FP8 matrix is multiplied by its scale and becomes fp32. In Mistral's format, the rotary embedding
        rotates adjacent pairs of dimensions, but the head rotates halves. The rows of q and k are then
        reordered.
        """
        if scale is not None:
            tensor = tensor.to(torch.float32) * scale.reshape(())
        return halves(tensor, self.pairs) if self.pairs and name.endswith(TURNED) else tensor

    def take_if_there(self, reader: CheckpointReader, name: str) -> torch.Tensor | None:
        """Read one tensor, or return None if this tensor is not among the tensors to read."""
        return self.take(reader, name) if name in self.shapes else None

    def take_stored(self, reader: CheckpointReader, name: str) -> torch.Tensor:
        """Read an index or mask tensor in its stored type.

        Raises:
            CheckpointError: The tensor contains floating-point numbers.
        """
        actual, shape = self.named(name)
        dtype = reader.tensors[actual].dtype
        if dtype.is_floating_point:
            raise CheckpointError(
                f"{reader.path}: {actual} has the type {dtype}, but must contain integers. Export the head "
                "again.",
                field=actual,
            )
        return reader.take(actual, shape, dtype=dtype)

    def take_norm(self, reader: CheckpointReader, name: str, eps: float) -> RMSNorm:
        """Read a norm."""
        return RMSNorm(self.take(reader, name), eps)

    def take_linear(self, reader: CheckpointReader, names: Sequence[str]) -> Linear:
        """Read projections (names without ``.weight``) as one matrix, with their biases if there are any."""
        matrices = [f"{name}.weight" for name in names]
        if any(name in self.scales or (self.pairs and name.endswith(TURNED)) for name in matrices):
            weight = torch.cat([self.take(reader, name) for name in matrices])
        else:
            weight = reader.take_rows([self.named(name) for name in matrices])
        if f"{names[0]}.bias" not in self.shapes:
            return Linear(weight)
        return Linear(weight, reader.take_rows([self.named(f"{name}.bias") for name in names]))

    def take_attention(self, reader: CheckpointReader, config: HeadConfig, layer: int) -> AttentionBlock:
        """Read the attention of a layer."""
        if config.latent is not None:
            return take_latent_attention(
                partial(self.take, reader), partial(self.take_norm, reader), config, config.latent, layer
            )
        prefix = f"layers.{layer}.self_attn."
        qkv = self.take_linear(reader, [f"{prefix}{part}_proj" for part in "qkv"])
        o = self.take_linear(reader, [f"{prefix}o_proj"])
        norm = None
        if f"{prefix}q_norm.weight" in self.shapes:
            q, k = (self.take(reader, f"{prefix}{part}_norm.weight") for part in "qk")
            norm = HeadNorm(q, k, config.num_heads, config.num_kv_heads, config.rms_norm_eps)
        window = config.sliding_window or 0
        return Attention(
            qkv,
            o,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            layer,
            head_norm=norm,
            window=window,
        )

    def take_mlp(self, reader: CheckpointReader, config: HeadConfig, layer: int) -> GatedMLP:
        """Read the MLP of a layer."""
        prefix = f"layers.{layer}.mlp."
        gate_up = self.take_linear(reader, [f"{prefix}gate_proj", f"{prefix}up_proj"])
        return GatedMLP(gate_up, self.take_linear(reader, [f"{prefix}down_proj"]), config.activation)


def read_scale(reader: CheckpointReader, name: str) -> torch.Tensor:
    """Return the scale of an FP8 matrix, ``[] fp32`` on the host.

    Raises:
        CheckpointError: The scale is not finite.
    """
    file = next(file for file in reader.files if name in file.tensors)
    scale = file.read(name).to(torch.float32).reshape(()).clone()
    if not bool(torch.isfinite(scale)):
        raise CheckpointError(
            f"{reader.path}: {name} is {float(scale)}, not a finite scale. Download the checkpoint again.",
            field=name,
        )
    return scale


def canonical_names(
    reader: CheckpointReader, rename: Callable[[str], str] = lambda name: name
) -> dict[str, str]:
    """Return a mapping from canonical names to the names in the file, for all tensors of a head's checkpoint.

    Args:
        reader: Reader of the checkpoint.
        rename: An additional function that renames tensors. Its argument is a name from which the prefix
            ``model.`` was removed and in which ``midlayer.`` was replaced.

    Raises:
        CheckpointError: Two tensors of the file have the same canonical name.
    """
    stored: dict[str, str] = {}
    native = is_native(reader.names)
    for name in reader.names:
        plain = name.removeprefix("model.")
        if native:
            plain = native_rename(plain)
        if plain.startswith("midlayer."):
            plain = FIRST_LAYER + plain.removeprefix("midlayer.")
        known = stored.setdefault(rename(plain), name)
        if known != name:
            raise CheckpointError(
                f"{reader.path}: {known} and {name} are two names of the same tensor; keep one of them.",
                field=name,
            )
    return stored


def layer_shapes(
    config: HeadConfig, layer: int, input_size: int, stored: Mapping[str, str], *, qkv_bias: bool = False
) -> dict[str, TensorShape]:
    """Return the names and shapes of one layer's projections and of its norm post_attention_layernorm.

    Args:
        config: Sizes of the head's layers.
        layer: Index of the layer.
        input_size: Width of the input of q, k and v.
        stored: Canonical names of the tensors in the file. They show which groups of projections have biases.
            If one projection of a group has a bias, every projection of the group must have one.
        qkv_bias: True if q, k and v must have biases even if the file contains none.
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    prefix = f"layers.{layer}."
    groups: list[dict[str, tuple[int, int]]] = [
        {"mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden)},
        {"mlp.down_proj": (hidden, inner)},
    ]
    shapes: dict[str, TensorShape] = {f"{prefix}post_attention_layernorm.weight": (hidden,)}
    if config.latent is None:
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        groups.append({"self_attn.o_proj": (hidden, queries)})
        groups.append(
            {
                f"self_attn.{part}_proj": (rows, input_size)
                for part, rows in (("q", queries), ("k", keys), ("v", keys))
            }
        )
        norms = [f"{prefix}self_attn.{part}_norm.weight" for part in "qk"]
        if any(name in stored for name in norms):  # as in heads for Qwen3
            shapes |= dict.fromkeys(norms, (config.head_dim,))
    else:
        shapes |= latent_shapes(config, config.latent, f"{prefix}self_attn.", input_size)
    for group in groups:
        biased = any(f"{prefix}{name}.bias" in stored for name in group) or (qkv_bias and len(group) == 3)
        for name, (rows, columns) in group.items():
            shapes[f"{prefix}{name}.weight"] = (rows, columns)
            if biased:
                shapes[f"{prefix}{name}.bias"] = (rows,)
    return shapes


def _scales(
    reader: CheckpointReader, stored: Mapping[str, str], shapes: Mapping[str, TensorShape]
) -> dict[str, str]:
    """Return a mapping from the canonical name of each FP8 matrix to the name of the matrix's scale.

    Raises:
        CheckpointError: A matrix has more than one scale.
    """
    scales: dict[str, str] = {}
    for name, actual in stored.items():
        if not name.endswith(SCALE):
            continue
        matrix = name.removesuffix(SCALE) + ".weight"
        info = reader.tensors[actual]
        if prod(info.shape) != 1:
            raise CheckpointError(
                f"{reader.path}: {actual} has the shape {list(info.shape)}. Only one scale per tensor is "
                "supported; export the head with one scale, or in bf16.",
                field=actual,
            )
        if matrix in shapes and matrix in stored:
            scales[matrix] = actual
    return scales


def _dialect(reader: CheckpointReader) -> str:
    if is_native(reader.names):
        return NATIVE
    return next(
        (prefix for prefix in DIALECTS if any(name.startswith(prefix) for name in reader.names)), DIALECTS[0]
    )


def _spell(name: str, dialect: str) -> str:
    """Return the name that this file would use for a tensor that it lacks."""
    if dialect == NATIVE:
        return native_spell(name)
    if name.startswith(FIRST_LAYER):
        return dialect + name.removeprefix(FIRST_LAYER)
    return f"model.{name}" if name.startswith("layers.") and dialect.startswith("model.") else name
