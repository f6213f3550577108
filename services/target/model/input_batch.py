"""Per-batch inputs of a verify pass at fixed addresses: page table, limits, sampling parameters, trees.

All inputs are in one buffer, so that a single copy from the host loads every input. The copy is in stream
order, so a pass that still runs does not see the new values.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np
import torch

from outrider.kernels.verify import SamplingTensors
from outrider.services.target.scheduling.sequence import Sequence
from outrider.shared.base.generation import SamplingParams
from outrider.shared.spec.tree import DraftBatch, mask_words

STAGES = 4
"""Number of pinned buffers, used in turn, because a copy may still be in flight when the next is prepared."""


class SamplingMode(Enum):
    """The sampling code that a batch needs. A CUDA graph contains the code of a single mode."""

    GREEDY = "greedy"
    NOISE = "noise"
    FILTERED = "filtered"

    @classmethod
    def of(cls, sequences: Seq[Sequence]) -> SamplingMode:
        """Return the cheapest mode that serves all sequences."""
        warm = [
            sequence.request.sampling for sequence in sequences if sequence.request.sampling.temperature > 0
        ]
        if not warm:
            return cls.GREEDY
        filtered = any(params.top_k > 0 or params.top_p < 1 or params.min_p > 0 for params in warm)
        return cls.FILTERED if filtered else cls.NOISE


@dataclass(frozen=True, slots=True)
class _HostTrees:
    """The fields of `DraftBatch` in the host buffer."""

    tokens: np.ndarray
    parents: np.ndarray
    depths: np.ndarray
    num_nodes: np.ndarray
    ancestors: np.ndarray

    def clear(self) -> None:
        """Write single-node trees."""
        self.parents[:] = -1
        self.num_nodes[:] = 1
        self.ancestors[:, :, 0] = 1

    def take(self, drafts: DraftBatch) -> None:
        """Write trees into a cleared buffer."""
        bs, width, words = drafts.ancestors.shape
        self.num_nodes[:bs] = drafts.num_nodes.numpy()
        self.tokens[:bs, :width] = drafts.tokens.numpy()
        self.parents[:bs, :width] = drafts.parents.numpy()
        self.depths[:bs, :width] = drafts.depths.numpy()
        self.ancestors[:bs, :width, :words] = drafts.ancestors.numpy()


class InputBatch:
    """The inputs of one batch size. Rows after the last sequence are idle, which means that their limit is 0.

    Args:
        bs: Number of rows.
        nodes: Number of tree nodes per row. Sampling parameters are repeated for each node.
        pages: Number of columns of the page table.
        page_size: Number of tokens per page.
        device: Device of the tensors.

    Attributes:
        page_table: ``[bs, pages] int32``; the page ids of each row's lease.
        limits: ``[bs] int32``; the length at which each sequence ends, or 0 for idle rows. A row takes part
            in rounds while its committed_len is below this limit.
        committed_lens: ``[bs] int32``; the value at the time of `load`, or 1 for idle rows.
        query_start: ``[bs + 1] int32``; multiples of `nodes`.
        trees: ``[bs, nodes]``; the trees that `load` has copied, or else single-node trees.
        nothing, ones, no_parent: ``[bs] int32`` constants 0, 1 and -1.
    """

    def __init__(self, bs: int, nodes: int, pages: int, page_size: int, device: torch.device) -> None:
        self.bs = bs
        self.nodes = nodes
        self.pages = pages
        self.page_size = page_size
        rows = bs * nodes
        # Seeds come first, because 64-bit values need alignment.
        sizes = {
            "seeds": 2 * rows,
            "limits": bs,
            "committed_lens": bs,
            "temperature": rows,
            "top_k": rows,
            "top_p": rows,
            "min_p": rows,
        }
        sizes |= {"choices": rows, "page_table": bs * pages}
        words = mask_words(nodes)
        sizes |= {"tokens": rows, "parents": rows, "depths": rows, "num_nodes": bs, "ancestors": rows * words}
        total = sum(sizes.values())
        self._host = np.zeros(total + total % 2, dtype=np.int32)
        self._pinned: list[torch.Tensor] = []
        self._copied: list[torch.cuda.Event] = []
        self._stage = 0
        with torch.inference_mode(False):
            if device.type == "cuda":
                self._device_buffer = torch.zeros(len(self._host), dtype=torch.int32, device=device)
                self._pinned = [
                    torch.zeros(len(self._host), dtype=torch.int32, pin_memory=True) for _ in range(STAGES)
                ]
                self._copied = [torch.cuda.Event() for _ in range(STAGES)]  # type: ignore[no-untyped-call]
            else:
                self._device_buffer = torch.from_numpy(self._host)
            self.query_start = torch.arange(0, rows + 1, nodes, dtype=torch.int32, device=device)
            self.nothing = torch.zeros(bs, dtype=torch.int32, device=device)
            self.ones, self.no_parent = self.nothing + 1, self.nothing - 1
        host: dict[str, np.ndarray] = {}
        tensors: dict[str, torch.Tensor] = {}
        offset = 0
        for name, size in sizes.items():
            host[name] = self._host[offset : offset + size]
            tensors[name] = self._device_buffer[offset : offset + size]
            offset += size
        self._seeds = host["seeds"].view(np.uint64)
        self._limits, self._committed = host["limits"], host["committed_lens"]
        self._temperature, self._top_p, self._min_p = (
            host[name].view(np.float32) for name in ("temperature", "top_p", "min_p")
        )
        self._top_k, self._choices = host["top_k"], host["choices"]
        self._table = host["page_table"].reshape(bs, pages)
        self._held = [0] * bs  # number of each row's pages that are already in the table
        self.limits, self.committed_lens = tensors["limits"], tensors["committed_lens"]
        self.page_table = tensors["page_table"].view(bs, pages)
        self.trees = DraftBatch(
            tokens=tensors["tokens"].view(bs, nodes),
            parents=tensors["parents"].view(bs, nodes),
            depths=tensors["depths"].view(bs, nodes),
            num_nodes=tensors["num_nodes"],
            ancestors=tensors["ancestors"].view(bs, nodes, words),
        )
        self._trees = _HostTrees(
            host["tokens"].reshape(bs, nodes),
            host["parents"].reshape(bs, nodes),
            host["depths"].reshape(bs, nodes),
            host["num_nodes"],
            host["ancestors"].reshape(bs, nodes, words),
        )
        self._rows = SamplingTensors(
            temperature=tensors["temperature"].view(torch.float32),
            top_k=tensors["top_k"],
            top_p=tensors["top_p"].view(torch.float32),
            min_p=tensors["min_p"].view(torch.float32),
            seeds=tensors["seeds"].view(torch.int64),
            choices=tensors["choices"],
            all_greedy=True,
            any_filter=False,
        )
        self._clear()
        self._upload()

    def sampling(self, mode: SamplingMode) -> SamplingTensors:
        """Return the sampling parameters of all ``bs * nodes`` rows."""
        return replace(
            self._rows, all_greedy=mode is SamplingMode.GREEDY, any_filter=mode is SamplingMode.FILTERED
        )

    @property
    def first_rows(self) -> SamplingTensors:
        """Views of the sampling parameters with one row per sequence, ``[bs]``."""
        rows, step = self._rows, self.nodes
        return replace(
            rows,
            temperature=rows.temperature[::step],
            top_k=rows.top_k[::step],
            top_p=rows.top_p[::step],
            min_p=rows.min_p[::step],
            seeds=rows.seeds[::step],
            choices=rows.choices[::step],
        )

    def load(self, sequences: Seq[Sequence | None], drafts: DraftBatch | None = None) -> None:
        """Upload the inputs of the sequences. None makes a row idle, and all rows after the list are idle.

        Args:
            sequences: One sequence per row.
            drafts: The trees of the sequences. Trees in host memory are uploaded with the other inputs. Trees
                on the device are copied on the device.
        """
        self._clear()
        if drafts is not None and not drafts.tokens.is_cuda:
            self._trees.take(drafts)
        for row, sequence in enumerate(sequences):
            if sequence is not None:
                self._limits[row] = sequence.end_len
                self._committed[row] = sequence.committed_len
                self._sample(slice(row * self.nodes, (row + 1) * self.nodes), sequence.request.sampling)
                self._take_pages(row, sequence)
        self._upload()
        if drafts is not None and drafts.tokens.is_cuda:
            _copy_trees(self.trees, drafts)

    def refresh(self, sequences: Seq[Sequence | None]) -> None:
        """Upload the rows that have ended and the pages that were added since `load`."""
        changed = False
        for row, sequence in enumerate(sequences):
            if sequence is None:
                changed |= bool(self._limits[row])
                self._limits[row] = 0
            else:
                changed |= self._take_pages(row, sequence)
        if changed:
            self._upload()

    def make_idle(self) -> None:
        """Make all rows idle."""
        self._clear()
        self._upload()

    def _take_pages(self, row: int, sequence: Sequence) -> bool:
        assert sequence.lease is not None
        pages, held = sequence.lease.pages, self._held[row]
        if len(pages) == held:
            return False
        self._table[row, held : len(pages)] = pages[held:]
        self._held[row] = len(pages)
        return True

    def _sample(self, rows: slice, params: SamplingParams) -> None:
        self._seeds[rows] = params.seed
        self._temperature[rows] = params.temperature
        self._top_k[rows] = params.top_k
        self._top_p[rows] = params.top_p
        self._min_p[rows] = params.min_p
        self._choices[rows] = params.choice_index

    def _clear(self) -> None:
        self._host[:] = 0
        self._committed[:] = 1
        self._top_p[:] = 1.0
        self._trees.clear()
        self._held = [0] * self.bs

    def _upload(self) -> None:
        """Copy the host buffer to the device. On a CPU, the two buffers are the same memory."""
        if not self._pinned:
            return
        stage = self._stage = (self._stage + 1) % STAGES
        self._copied[stage].synchronize()
        self._pinned[stage].numpy()[:] = self._host
        self._device_buffer.copy_(self._pinned[stage], non_blocking=True)
        self._copied[stage].record()


def _copy_trees(static: DraftBatch, drafts: DraftBatch) -> None:
    """Copy trees into tensors with fixed addresses, which must contain single-node trees."""
    bs, width, words = drafts.ancestors.shape
    static.num_nodes[:bs].copy_(drafts.num_nodes)
    static.tokens[:bs, :width].copy_(drafts.tokens)
    if width > 1:
        static.parents[:bs, :width].copy_(drafts.parents)
        static.depths[:bs, :width].copy_(drafts.depths)
        static.ancestors[:bs, :width, :words].copy_(drafts.ancestors)
