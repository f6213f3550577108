"""Deterministic decoders: the result of a row (token) has the same bits, whatever the rest of the batch is.

In other decoders, the order of additions depends on the number of rows. The vector units of a CPU also round
the numbers at the end of a buffer differently. A token may therefore get slightly different logits in a tree,
in a decode step and in a prompt chunk. The difference may decide between two nearly equal tokens. Two
decoders avoid this:

- `RowByRow` (CPU, any model) runs every row as a separate forward pass.
- `BatchInvariant` (GPU) uses products and norms whose order of addition depends only on the weight.

Both decoders use `DeterministicAttention`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.nn import functional

from outrider.kernels.invariant_gemm import invariant_gemm
from outrider.kernels.row_norm import row_norm
from outrider.kernels.verify import SamplingTensors, choose_tokens
from outrider.shared.attn.base import AttentionBackend
from outrider.shared.attn.deterministic import DeterministicAttention
from outrider.shared.base.errors import ConfigurationError
from outrider.shared.kv.pool import KVPool
from outrider.shared.nn.config.model_config import Activation
from outrider.shared.nn.decoder import Decoder, DecoderOutput
from outrider.shared.nn.generic.layout import GenericConfig
from outrider.shared.nn.layers.linear import Linear
from outrider.shared.nn.layers.modules import Attention, DecoderLayer, GatedMLP, HeadNorm, RMSNorm
from outrider.shared.nn.layers.rope import Rotation, rotate

FILTER_ROWS = 16
"""Number of rows for which the sampling filters are called together on a GPU.

The number is fixed, because the rounding of sums over the vocabulary depends on the number of rows.
"""


def deterministic(decoder: Decoder) -> Decoder:
    """Return a deterministic decoder that has the same weights as a given decoder.

    Raises:
        ConfigurationError: A layer of the model has no batch-invariant kernel on the GPU. The error's `field`
            is ``deterministic``.
    """
    return RowByRow(decoder) if decoder.device.type == "cpu" else BatchInvariant(decoder)


class RowByRow(Decoder):
    """Deterministic decoder for any model: runs each row (token) as a separate forward pass.

    The K/V of a row is stored when the row runs. A tree node must therefore come after its parent.

    Args:
        decoder: Decoder that computes one row at a time.
    """

    def __init__(self, decoder: Decoder) -> None:
        self.__dict__.update(decoder.__dict__)
        self._decoder = decoder

    @property
    def weight_bytes(self) -> int:
        return self._decoder.weight_bytes

    @property
    def computed_by(self) -> str:
        return f"{self._decoder.computed_by}, row by row"

    def weight(self, name: str) -> torch.Tensor:
        return self._decoder.weight(name)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return self._decoder.embed(tokens)

    @torch.inference_mode()
    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionBackend,
        pool: KVPool,
        aux_layer_ids: Sequence[int] = (),
    ) -> DecoderOutput:
        """Run one row after another; see `Decoder.forward`. The results of rows without a slot are zeros."""
        assert isinstance(attention, DeterministicAttention), (
            "a deterministic decoder needs DeterministicAttention"
        )
        assert attention.batch is not None, "call plan() before forward()"
        size = self.config.hidden_size
        hidden = torch.zeros((tokens.shape[0], size), dtype=self.dtype, device=self.device)
        aux = (
            torch.zeros((tokens.shape[0], size * len(aux_layer_ids)), dtype=self.dtype, device=self.device)
            if aux_layer_ids
            else None
        )
        for row, slot in enumerate(attention.batch.slots.tolist()):
            if slot < 0:
                continue
            one = slice(row, row + 1)
            output = self._decoder.forward(
                tokens[one].clone(), positions[one].clone(), attention.select(row), pool, aux_layer_ids
            )
            hidden[one] = output.hidden
            if aux is not None and output.aux is not None:
                aux[one] = output.aux
        return DecoderOutput(hidden, aux)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        rows = [self._decoder.logits(hidden[row : row + 1].clone()) for row in range(hidden.shape[0])]
        return torch.cat(rows) if rows else self._decoder.logits(hidden)

    def choose_from(
        self, logits: torch.Tensor, sampling: SamplingTensors, positions: torch.Tensor
    ) -> torch.Tensor:
        rows = [
            choose_tokens(
                logits[row : row + 1].clone(),
                sampling_rows(sampling, slice(row, row + 1)),
                positions[row : row + 1].clone(),
            )
            for row in range(logits.shape[0])
        ]
        return torch.cat(rows) if rows else positions


class BatchInvariant(Decoder):
    """Deterministic decoder for dense models: its kernels add in the same order for any number of rows.

    Args:
        decoder: Decoder that supplies the weights. It is not changed.

    Raises:
        ConfigurationError: The model has layers other than rotary attention and gated MLPs.
    """

    def __init__(self, decoder: Decoder) -> None:
        self.__dict__.update(decoder.__dict__)
        if isinstance(decoder.config, GenericConfig):
            raise _refused(f"{decoder.config.architecture} runs through transformers' modules")
        self.fused = None
        self._invariant = [_InvariantLayer(layer) for layer in decoder.layers]

    @property
    def computed_by(self) -> str:
        return "batch-invariant kernels"

    @torch.inference_mode()
    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionBackend,
        pool: KVPool,
        aux_layer_ids: Sequence[int] = (),
    ) -> DecoderOutput:
        rotation = self.rotary(positions)
        hidden = self.embed(tokens)
        aux: list[torch.Tensor] = []
        for index, layer in enumerate(self._invariant):
            hidden = layer(hidden, rotation, attention, pool)
            if index in aux_layer_ids:
                aux.append(hidden)
        return DecoderOutput(
            hidden=row_norm(hidden, self.norm.weight, self.norm.eps),
            aux=torch.cat(aux, dim=-1) if aux else None,
        )

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return invariant_gemm(hidden, self.lm_head)

    def choose_from(
        self, logits: torch.Tensor, sampling: SamplingTensors, positions: torch.Tensor
    ) -> torch.Tensor:
        """Choose the next token from each row of logits; see `Decoder.choose_from`.

        If sampling filters are used, rows are processed in groups of `FILTER_ROWS`. The last group is padded.
        """
        if sampling.all_greedy or not sampling.any_filter:
            return choose_tokens(logits, sampling, positions)
        rows = logits.shape[0]
        index = torch.arange(-(-rows // FILTER_ROWS) * FILTER_ROWS, device=logits.device).clamp(max=rows - 1)
        groups = []
        for first in range(0, index.shape[0], FILTER_ROWS):
            part = index[first : first + FILTER_ROWS]
            groups.append(choose_tokens(logits[part], sampling_rows(sampling, part), positions[part]))
        return torch.cat(groups)[:rows]


def sampling_rows(sampling: SamplingTensors, rows: slice | torch.Tensor) -> SamplingTensors:
    """Return the sampling parameters of some rows."""
    return replace(
        sampling,
        temperature=sampling.temperature[rows],
        top_k=sampling.top_k[rows],
        top_p=sampling.top_p[rows],
        min_p=sampling.min_p[rows],
        seeds=sampling.seeds[rows],
        choices=sampling.choices[rows],
        rules=None if sampling.rules is None else sampling.rules.select(rows),
        allowed=None if sampling.allowed is None else sampling.allowed[rows].contiguous(),
    )


class _InvariantLayer:
    """One decoder layer with batch-invariant kernels.

    Element-wise operations are those of torch. On a GPU, torch computes every element in the same way, so
    they do not depend on the number of rows.

    Args:
        layer: Supplies the weights.
    """

    def __init__(self, layer: DecoderLayer) -> None:
        if not isinstance(layer.attention, Attention) or not isinstance(layer.mlp, GatedMLP):
            block = layer.attention if not isinstance(layer.attention, Attention) else layer.mlp
            raise _refused(f"the model has layers of an unsupported kind ({type(block).__name__})")
        for linear in (layer.attention.qkv, layer.attention.o, layer.mlp.gate_up, layer.mlp.down):
            if type(linear) is not Linear:
                raise _refused(f"the model has weights of an unsupported kind ({type(linear).__name__})")
        self._norms = layer.input_norm, layer.post_attention_norm
        self._attention = layer.attention
        self._mlp = layer.mlp

    def __call__(
        self, hidden: torch.Tensor, rotation: Rotation, attention: AttentionBackend, pool: KVPool
    ) -> torch.Tensor:
        """Return the residual stream after this layer, ``[rows, hidden]``."""
        before, between = self._norms
        hidden = self._attend(_norm(before, hidden), hidden, rotation, attention, pool)
        return self._transform(_norm(between, hidden), hidden)

    def _attend(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        rotation: Rotation,
        attention: AttentionBackend,
        pool: KVPool,
    ) -> torch.Tensor:
        block = self._attention
        rotated = block.num_heads + block.num_kv_heads
        qkv = _product(block.qkv, x).view(x.shape[0], -1, block.head_dim)
        heads = qkv[:, :rotated].contiguous()
        if block.head_norm is not None:
            heads = _head_norm(block.head_norm, heads)
        rotate(heads, rotation)
        q, k, v = heads[:, : block.num_heads], heads[:, block.num_heads :], qkv[:, rotated:]
        attended = attention.run(block.layer, q, k, v, pool, block.scale, block.window, block.sinks)
        return _product(block.o, attended, residual)

    def _transform(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        block = self._mlp
        gate, up = _product(block.gate_up, x).chunk(2, dim=-1)
        gate = (
            functional.silu(gate)
            if block.activation is Activation.SILU
            else functional.gelu(gate, approximate="tanh")
        )
        return _product(block.down, gate * up, residual)


def _product(linear: Linear, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
    return invariant_gemm(x, linear.weight, linear.bias, residual)


def _norm(norm: RMSNorm, x: torch.Tensor) -> torch.Tensor:
    return row_norm(x, norm.weight, norm.eps)


def _head_norm(norm: HeadNorm, heads: torch.Tensor) -> torch.Tensor:
    return row_norm(heads, norm.weight, norm.eps)


def _refused(why: str) -> ConfigurationError:
    return ConfigurationError(
        f"deterministic: {why}, for which there are no batch-invariant kernels on a GPU; "
        "leave --deterministic out, or use --device cpu, where any model can run row by row.",
        field="deterministic",
    )
