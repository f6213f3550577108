"""Decoders whose rows are computed alike, to the bit, whatever other rows are in the step.

A library's product, norm or softmax adds in an order that depends on how many rows there are, and a vector unit rounds the end of a buffer
unlike its middle. So tokens verified in a tree, decoded one by one or read in a prompt chunk differ in their last bits, and a near-tie may
go either way. Here they do not: on a CPU rows run one after the other, each as a step of its own; on a GPU all products and norms come from
kernels whose order of addition is a constant of the weight. Both attend by `DeterministicAttention`.
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
from outrider.shared.nn.layers.blocks import Attention, DecoderLayer, GatedMLP, HeadNorm, RMSNorm
from outrider.shared.nn.layers.linear import Linear
from outrider.shared.nn.layers.rope import Rotation, rotate

FILTER_ROWS = 16
"""Rows that the filters of sampling see at once on a GPU: sums over a vocabulary depend on how many rows there are."""


def deterministic(decoder: Decoder) -> Decoder:
    """Return a decoder over the same weights whose rows do not depend on each other.

    Raises:
        ConfigurationError: The model has layers that no such kernel computes on a GPU; `field` is the setting.
    """
    return RowByRow(decoder) if decoder.device.type == "cpu" else BatchInvariant(decoder)


class RowByRow(Decoder):
    """Runs each row as a step of its own, for any model. A row's K/V is stored before the rows behind it run: parents come first.

    Args:
        decoder: What computes a row.
    """

    def __init__(self, decoder: Decoder) -> None:
        self.__dict__.update(decoder.__dict__)
        self._decoder = decoder

    @property
    def weight_bytes(self) -> int:
        """See `Decoder.weight_bytes`."""
        return self._decoder.weight_bytes

    @property
    def computed_by(self) -> str:
        """See `Decoder.computed_by`."""
        return f"{self._decoder.computed_by}, row by row"

    def weight(self, name: str) -> torch.Tensor:
        """See `Decoder.weight`."""
        return self._decoder.weight(name)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """See `Decoder.embed`."""
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
        """See `Decoder.forward`. Rows that store nothing are padding: theirs are zeros."""
        assert isinstance(attention, DeterministicAttention), (
            "a deterministic decoder attends by DeterministicAttention"
        )
        assert attention.batch is not None, "plan() comes before forward()"
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
        """See `Decoder.logits`."""
        rows = [self._decoder.logits(hidden[row : row + 1].clone()) for row in range(hidden.shape[0])]
        return torch.cat(rows) if rows else self._decoder.logits(hidden)

    def choose(
        self, hidden: torch.Tensor, sampling: SamplingTensors, positions: torch.Tensor
    ) -> torch.Tensor:
        """See `Decoder.choose`."""
        logits = self.logits(hidden)
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
    """Runs a dense decoder by kernels whose sums have one order for every number of rows.

    Args:
        decoder: Whose weights are read; it stays as it is.

    Raises:
        ConfigurationError: It has other layers than rotary attention and gated MLPs.
    """

    def __init__(self, decoder: Decoder) -> None:
        self.__dict__.update(decoder.__dict__)
        if isinstance(decoder.config, GenericConfig):
            raise _refused(f"{decoder.config.architecture} runs through transformers' modules")
        self.fused = None
        self._invariant = [_InvariantLayer(layer) for layer in decoder.layers]

    @property
    def computed_by(self) -> str:
        """See `Decoder.computed_by`."""
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
        """See `Decoder.forward`."""
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
        """See `Decoder.logits`."""
        return invariant_gemm(hidden, self.lm_head)

    def choose(
        self, hidden: torch.Tensor, sampling: SamplingTensors, positions: torch.Tensor
    ) -> torch.Tensor:
        """See `Decoder.choose`. With filters, rows pass in groups of one size, the last filled up."""
        logits = self.logits(hidden)
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
    """Return the parameters of some rows."""
    return replace(
        sampling,
        temperature=sampling.temperature[rows],
        top_k=sampling.top_k[rows],
        top_p=sampling.top_p[rows],
        min_p=sampling.min_p[rows],
        seeds=sampling.seeds[rows],
        choices=sampling.choices[rows],
    )


class _InvariantLayer:
    """One decoder layer by invariant kernels. Element-wise operations are torch's: on a GPU each element is computed alike.

    Args:
        layer: Whose weights are read.
    """

    def __init__(self, layer: DecoderLayer) -> None:
        if not isinstance(layer.attention, Attention) or not isinstance(layer.mlp, GatedMLP):
            block = layer.attention if not isinstance(layer.attention, Attention) else layer.mlp
            raise _refused(f"the model has layers of another kind ({type(block).__name__})")
        for linear in (layer.attention.qkv, layer.attention.o, layer.mlp.gate_up, layer.mlp.down):
            if type(linear) is not Linear:
                raise _refused(f"the model's products are of another kind ({type(linear).__name__})")
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
        f"deterministic: {why}, for which there are no batch-invariant kernels on a GPU; leave --deterministic out, or use --device cpu, "
        "where every model is computed row by row.",
        field="deterministic",
    )
