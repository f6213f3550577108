"""For models that transformers runs: compares the stored tensors with those that transformers would save."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from outrider.services.doctor.finding import Finding
from outrider.services.doctor.judge_tensors import DOWNLOAD, count_and_names
from outrider.shared.nn.checkpoint.checkpoint_reader import (
    WRONG_TYPE,
    CheckpointReader,
    TensorShape,
    dtype_name,
)
from outrider.shared.nn.checkpoint.json_config import ConfigReader, faults_of
from outrider.shared.nn.config.model_config import CONFIG_FILE, read_json


def check_generic(reader: CheckpointReader, folder: Path) -> Iterator[Finding]:
    """Report tensors that are missing from a model's files, or have a wrong shape or type.

    A stored tensor with an unexpected name is not an error, because transformers renames tensors of older
    releases. If there are such names, a missing tensor may be stored under one of them. Missing tensors are
    then reported only as warnings.
    """
    from outrider.shared.nn.generic.weights import wrong_types

    model = model_of(folder)
    expected = saved_shapes(model, folder)
    stored = {name: info.shape for name, info in reader.tensors.items()}
    misshaped = [name for name, shape in expected.items() if name in stored and stored[name] != shape]
    if misshaped:
        first = misshaped[0]
        yield Finding.refused(
            first,
            f"{count_and_names(misshaped)} with the wrong shape: {list(stored[first])} instead of "
            f"{list(expected[first])}",
            DOWNLOAD,
        )
    wrong = wrong_types(reader.tensors, model)
    if wrong:
        first = next(iter(wrong))
        yield Finding.refused(
            first,
            f"{count_and_names(list(wrong))} {WRONG_TYPE}: {dtype_name(wrong[first])}",
            "Use a bf16 checkpoint.",
        )
    missing = [name for name in expected if name not in stored]
    others = [name for name in stored if name not in expected]
    if missing and others:
        yield Finding.warning(
            missing[0],
            f"{count_and_names(missing)} missing, but {count_and_names(others)} unexpected",
            "If the names are from an older release, transformers renames the tensors. Otherwise loading "
            "refuses them by name.",
        )
    elif missing:
        yield Finding.refused(missing[0], f"{count_and_names(missing)} missing", DOWNLOAD)


def model_of(folder: Path) -> Any:
    """Return the model for a folder's configuration, on the meta device."""
    from outrider.shared.nn.generic.config import find_class

    model_class: Any
    with faults_of(folder / CONFIG_FILE), torch.device("meta"):
        model_class, settings = find_class(
            ConfigReader(read_json(folder / CONFIG_FILE), folder / CONFIG_FILE)
        )
        return model_class._from_config(settings)


def saved_shapes(model: Any, folder: Path) -> Mapping[str, TensorShape]:
    """Return name → shape of the tensors that transformers would save for a model.

    Args:
        model: The model. This function changes the model's weight conversions.
        folder: Folder of the model's configuration.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import revert_weight_conversion

    with faults_of(folder / CONFIG_FILE):
        tied = set(model.all_tied_weights_keys)
        # Files store each expert of a layer separately, but the model stacks the experts. The next line
        # applies the conversion that save_pretrained applies.
        model._weight_conversions = get_model_conversion_mapping(model, add_legacy=False)
        tensors = revert_weight_conversion(
            model, {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
        )
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}
