"""One rank's part of a tensor-parallel decoder: its heads, MLP columns and rows of the output head."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from outrider.kernels.verify import SamplingTensors, choose_tokens
from outrider.shared.nn.config.model_config import ModelConfig
from outrider.shared.nn.decoder import EMBEDDING, FINAL_NORM, LM_HEAD, Decoder, OnLayer
from outrider.shared.nn.layers.load import load_layer
from outrider.shared.nn.layers.modules import DecoderLayer, RMSNorm
from outrider.shared.nn.open import CheckedSource
from outrider.shared.nn.quantized import quantize_decoder
from outrider.shared.parallel.collectives import Collectives
from outrider.shared.parallel.linear import parallelise, unparallelise
from outrider.shared.parallel.reduce import Reduce
from outrider.shared.parallel.shard import Shard, ShardedSource

HeadReader = Callable[[], torch.Tensor]
"""Reads the whole output head ``[vocab, hidden]`` for a draft that borrows the head."""


class ShardedDecoder(Decoder):
    """A rank's share of a decoder with tensor parallelism. `config` describes the whole model.

    All ranks must run `forward` together, because `forward` sums over the ranks. `columns` returns this
    rank's part of the logits.

    Args:
        shard: Describes this rank's share.
        collectives: Collectives over all ranks.
        embedding: ``[vocab, hidden]``, the whole embedding.
        layers: Layers with this rank's sizes. Each layer sums its results over the ranks.
        norm: The final norm.
        head: ``[vocabulary_rows, hidden]``, this rank's rows of the output head.
        fingerprint: Fingerprint of the whole model.
        reduce: Computes the layers' sums over the ranks.
    """

    def __init__(
        self,
        shard: Shard,
        collectives: Collectives,
        embedding: torch.Tensor,
        layers: list[DecoderLayer],
        norm: RMSNorm,
        head: torch.Tensor,
        fingerprint: str,
        reduce: Reduce,
    ) -> None:
        self.reduce = reduce
        super().__init__(shard.config, embedding, layers, norm, head, fingerprint)
        self.shard = shard
        self.collectives = collectives
        self._greedy: dict[int, SamplingTensors] = {}

    def _fuse(self) -> None:
        super()._fuse()
        if self.fused is not None:
            self.fused.reduce = self.reduce

    def quantize(self) -> None:
        """Compute this rank's matrix products in FP8 from now on. Every rank must call this method.

        Each rank computes the scales of its own columns of the o and down projections. These scales therefore
        differ between ranks.

        Raises:
            ConfigurationError: `quantize_decoder` rejects the model.
        """
        for layer in self.layers:
            unparallelise(layer)
        try:
            quantize_decoder(self)
        finally:
            for layer in self.layers:
                parallelise(layer, self.reduce)

    @property
    def cached(self) -> ModelConfig:
        """The configuration of the K/V cache on this rank: the model's config with this rank's head count."""
        return self.shard.local

    def columns(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return this rank's columns of the logits, ``[rows, vocabulary_rows]``.

        The last columns may be padding, whose token ids are not in the vocabulary. Ignore these columns.
        """
        return Decoder.logits(self, hidden)

    def sent_columns(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return `columns` in the dtype of the weights, because ranks can only gather equal dtypes."""
        return self.columns(hidden).to(self.dtype).contiguous()

    @torch.inference_mode()
    def best(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return, for each row, the highest logit among this rank's columns and its token id.

        The result is ``[rows, 2] int32``. The first number of a row is the logit, as the bits of an fp32
        number. The second number is the token id, or -1 if `choose_tokens` rejects the row's logits because
        they contain NaN or infinite numbers.
        """
        rows, first = hidden.shape[0], self.shard.rank * self.shard.vocabulary_rows
        count = max(0, min(self.shard.vocabulary_rows, self.config.vocab_size - first))
        if count == 0:  # This rank's rows of the head are all padding.
            worst = torch.full((rows,), float("-inf"), device=self.device)
            return torch.stack(
                [worst.view(torch.int32), torch.full_like(worst, self.config.vocab_size, dtype=torch.int32)],
                dim=1,
            )
        columns = self.columns(hidden)[:, :count].contiguous()
        ids = choose_tokens(
            columns, self._greedy_rows(rows), torch.zeros(rows, dtype=torch.int64, device=self.device)
        )
        values = columns.gather(1, ids.clamp(min=0)[:, None])[:, 0].float()
        return torch.stack([values.view(torch.int32), torch.where(ids < 0, ids, ids + first).int()], dim=1)

    def _greedy_rows(self, rows: int) -> SamplingTensors:
        known = self._greedy.get(rows)
        if known is None:
            zeros = torch.zeros(rows, device=self.device)
            ints = zeros.to(torch.int32)
            known = self._greedy[rows] = SamplingTensors(
                temperature=zeros,
                top_k=ints,
                top_p=zeros + 1,
                min_p=zeros,
                seeds=zeros.to(torch.int64),
                choices=ints,
                all_greedy=True,
                any_filter=False,
            )
        return known


def best_of(gathered: torch.Tensor) -> torch.Tensor:
    """Return the greedy token of each row, ``[rows] int64``, from all ranks' `ShardedDecoder.best`.

    The result equals the greedy choice from the whole logits. In a tie, the lowest token id wins. The token
    of a row is -1 if any rank's `best` has the token id -1 for this row.

    Args:
        gathered: ``[ranks, rows, 2] int32``.
    """
    values, ids = gathered[..., 0].contiguous().view(torch.float32), gathered[..., 1]
    best = ids.masked_fill(values < values.amax(0), torch.iinfo(torch.int32).max).amin(0)
    return best.masked_fill((ids < 0).any(0), -1).to(torch.int64)


Rank = TypeVar("Rank", bound=ShardedDecoder)


@torch.inference_mode()
def build_rank(
    kind: type[Rank],
    checkpoint: CheckedSource,
    shard: Shard,
    collectives: Collectives,
    reduce: Reduce,
    on_layer: OnLayer | None = None,
) -> Rank:
    """Build a rank's decoder from a source of whole tensors. The rank's part is cut out on the device.

    `on_layer` is called for each layer, as in `load_decoder`.
    """
    config, local, source = shard.config, shard.local, checkpoint.source
    table = (config.vocab_size, config.hidden_size)
    parts = ShardedSource(source, shard)
    embedding = source.take(EMBEDDING, table)
    layers = []
    for index in range(config.num_layers):
        layer = load_layer(parts, local, f"model.layers.{index}.", index)
        if on_layer is not None:
            on_layer(layer)
        layers.append(parallelise(layer, reduce))
    norm = RMSNorm(source.take(FINAL_NORM, (config.hidden_size,)), config.rms_norm_eps)
    tied = config.tie_word_embeddings
    head = shard.output_head(embedding if tied else source.take(LM_HEAD, table))
    if not tied:
        head = head.clone()  # Make a copy, because a view would keep the whole output head in memory.
    return kind(shard, collectives, embedding, layers, norm, head, checkpoint.fingerprint, reduce)
