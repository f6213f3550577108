"""A target and a draft on disk, read lazily: configurations, head, MTP layers, token map, tensor shapes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from outrider.services.draft.algorithm import Choice, check_head, check_token_map_use, choose_algorithm
from outrider.services.draft.growth.recurrent_head import RecurrentHead
from outrider.services.draft.heads.files.head_config import HeadConfig, flatten
from outrider.services.draft.heads.files.mistral_format import config_file, read_head_config
from outrider.services.draft.heads.files.token_map import read_token_map
from outrider.services.draft.heads.registry import load_head
from outrider.services.draft.strategies.mtp_layers import MtpWeights
from outrider.services.draft.strategies.standalone import StandaloneVocabulary
from outrider.services.draft.strategies.tokenizer_check import check_same_tokenizer
from outrider.services.draft.target_info import TargetInfo
from outrider.services.draft.vocab import DraftVocabulary
from outrider.shared.nn.checkpoint.checkpoint_reader import CheckpointReader
from outrider.shared.nn.checkpoint.fp8_source import expect_scales
from outrider.shared.nn.checkpoint.tensor_source import ExpectedTensors
from outrider.shared.nn.config.model_config import ConfigReader, ModelConfig
from outrider.shared.nn.kv_scales import find_scales
from outrider.shared.nn.open import expected_headers, read_model_config
from outrider.shared.spec.algorithm import Algorithm

HOST = torch.device("cpu")
ANYTHING = "*"
"""A pattern that matches every tensor. For a configuration with this pattern, transformers checks the
tensors."""
HEADERS_ONLY = torch.device("meta")


class Pair:
    """A target and a draft on disk. Each property reads its files on first use, and only once.

    Args:
        target: Folder of the target.
        draft: Folder of a head or a draft model, or None.
        algorithm: Value of the `speculative_algorithm` setting.
        device, dtype: Device and data type for serving.
        token_map: File of an FR-Spec token map, or None.

    Raises:
        CheckpointError: A property raises this error if its files are unusable.
    """

    def __init__(
        self,
        target: Path,
        draft: Path | None,
        algorithm: Algorithm,
        device: torch.device,
        dtype: torch.dtype,
        token_map: Path | None = None,
    ) -> None:
        self.target = target
        self.draft = draft
        self.algorithm = algorithm
        self.device = device
        self.dtype = dtype
        self.token_map = token_map

    @property
    def drafts(self) -> bool:
        """True if a server of this pair would speculate."""
        return self.algorithm is not Algorithm.NONE and (
            self.draft is not None or self.algorithm is not Algorithm.AUTO
        )

    @cached_property
    def target_config(self) -> ModelConfig:
        """The target's configuration."""
        return read_model_config(self.target)

    @cached_property
    def target_info(self) -> TargetInfo:
        """The facts about the target that a draft receives."""
        return TargetInfo.of(self.target.name, self.target_config)

    @cached_property
    def choice(self) -> Choice:
        """The drafting method and its folder."""
        return choose_algorithm(self.algorithm, self.draft, self.target)

    @cached_property
    def draft_raw(self) -> Mapping[str, Any]:
        """The draft's config.json, unmodified."""
        return read_head_config(self.choice.require_folder())

    @cached_property
    def head_reader(self) -> ConfigReader:
        """The head's config.json with its sections merged."""
        source = config_file(self.choice.require_folder())
        return ConfigReader(flatten(self.draft_raw, source), source)

    @cached_property
    def head_config(self) -> HeadConfig:
        """Configuration of the head's decoder layers."""
        return HeadConfig.parse(self.head_reader)

    @cached_property
    def head(self) -> RecurrentHead:
        """The head, loaded on the host by the loader that is used for serving."""
        head = load_head(self.choice.require_folder(), HOST, self.dtype, self.token_ids)
        check_head(self.choice, head.algorithm)
        return head

    @cached_property
    def token_ids(self) -> torch.Tensor | None:
        """Token ids in the token map, or None for all tokens."""
        check_token_map_use(self.choice, self.token_map)
        return read_token_map(self.token_map) if self.token_map is not None else None

    @cached_property
    def drafted(self) -> DraftVocabulary:
        """The tokens that can be drafted."""
        if self.choice.algorithm is Algorithm.STANDALONE:
            return self.standalone_vocabulary.of_draft(self.draft_model.vocab_size)
        if self.choice.algorithm is Algorithm.MTP:
            return DraftVocabulary.from_token_map(self.token_ids, self.mtp.config.vocab_size)
        if self.choice.algorithm is Algorithm.EAGLE:
            return self.head.vocabulary
        check_token_map_use(self.choice, self.token_map)
        return DraftVocabulary.identity(self.target_config.vocab_size)

    @cached_property
    def mtp(self) -> MtpWeights:
        """The shapes of the checkpoint's MTP layers."""
        return MtpWeights.load(self.choice.require_folder(), HEADERS_ONLY, self.dtype)

    @cached_property
    def standalone_vocabulary(self) -> StandaloneVocabulary:
        """Mapping between the token ids of a draft model and the target."""
        same = check_same_tokenizer(self.choice.require_folder(), self.target)
        return StandaloneVocabulary(self.target_config.vocab_size, same, self.token_ids)

    @cached_property
    def draft_model(self) -> ModelConfig:
        """Configuration of a standalone draft model."""
        return read_model_config(self.choice.require_folder())


def expected_of(reader: CheckpointReader, config: ModelConfig) -> ExpectedTensors:
    """Return the tensors that a model's files must contain, including FP8 scales of weights and KV cache.

    The result is empty for a model that Outrider runs with the modules of the package transformers. That
    package renames tensors while it loads them, and checks the tensors itself.
    """
    if ANYTHING in config.ignored:
        return ExpectedTensors()
    expected = expected_headers(config)
    if config.weight_block:
        expect_scales(expected, reader.tensors, config.weight_block)
    expected.shapes |= find_scales(reader.tensors, config)
    return expected
