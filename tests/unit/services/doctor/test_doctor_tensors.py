"""The doctor reports each damaged or untrained tensor by name, and does not warn about trained tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from outrider.services.doctor.finding import Finding, Severity
from outrider.services.doctor.judge_tensors import NamedStatistics, judge
from outrider.services.doctor.statistics import TensorStatistics, tensor_statistics

torch.set_num_threads(1)
DEMO = Path(__file__).parents[4] / "models" / "demo"
Damage = Callable[[torch.Tensor, torch.Generator], torch.Tensor]


def kaiming_uniform(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    bound = 1 / tensor.shape[-1] ** 0.5
    return torch.rand(tensor.shape, generator=generator) * 2 * bound - bound


def one_nan(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    broken = tensor.float().clone()
    broken.view(-1)[0] = float("nan")  # samples include the first number
    return broken


DAMAGES: dict[str, Damage] = {
    "normal": lambda tensor, generator: torch.randn(tensor.shape, generator=generator) * 0.02,
    "kaiming uniform": kaiming_uniform,
    "zeros": lambda tensor, generator: torch.zeros_like(tensor),
    "constant": lambda tensor, generator: torch.full_like(tensor, 0.25),
    "NaN": one_nan,
}


def read(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:  # type: ignore[no-untyped-call]
            names = opened.keys()
            tensors |= {name: opened.get_tensor(name) for name in names}
    return {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}


class Model:
    """A model of the embedded pair with the statistics of its tensors."""

    def __init__(self, folder: Path, *, sampled: bool) -> None:
        self.tensors = read(folder)
        self.sampled = sampled
        self.examined = {
            name: tensor_statistics(tensor, whole=not sampled) for name, tensor in self.tensors.items()
        }

    def findings(self, name: str = "", changed: TensorStatistics | None = None) -> Sequence[Finding]:
        examined = self.examined | ({name: changed} if changed is not None else {})
        found = judge([NamedStatistics(*one) for one in examined.items()], "the model", sampled=self.sampled)
        return [finding for finding in found if finding.severity is not Severity.OK]


@pytest.fixture(scope="module", params=["eagle3", "target"])
def model(request: pytest.FixtureRequest) -> Model:
    return Model(DEMO / request.param, sampled=request.param == "target")


def test_trained_tensors_raise_nothing(model: Model) -> None:
    assert [finding.message for finding in model.findings()] == []


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_single_untrained_or_broken_tensor_is_named(model: Model, damage: str) -> None:
    generator = torch.Generator().manual_seed(3)
    missed = []
    for name, tensor in model.tensors.items():
        changed = tensor_statistics(DAMAGES[damage](tensor, generator), whole=not model.sampled)
        if not any(
            name == finding.field or name in finding.message for finding in model.findings(name, changed)
        ):
            missed.append(name)
    assert missed == []
    assert len(model.tensors) > 10


def test_a_tensor_as_stored_in_half_precision_is_named_too() -> None:
    head = Model(DEMO / "eagle3", sampled=False)
    generator = torch.Generator().manual_seed(4)
    for dtype in (torch.bfloat16, torch.float16):
        changed = tensor_statistics((torch.randn(256, 768, generator=generator) * 0.02).to(dtype), whole=True)
        (finding,) = head.findings("fc.weight", changed)
        assert finding.field == "fc.weight"
        assert finding.severity is Severity.WARNING
        assert "normal, std 0.02" in finding.message


def test_a_truncated_normal_distribution_is_an_initialisation_too() -> None:
    tensor = torch.nn.init.trunc_normal_(
        torch.empty(512, 256), std=0.02, a=-0.04, b=0.04, generator=torch.Generator().manual_seed(1)
    )
    assert tensor_statistics(tensor, whole=True).looks_initialised.startswith("truncated normal")


def test_a_tensor_is_suspected_if_its_size_differs_from_other_layers() -> None:
    """Some trained tensors look initialised; they are suspected only if other layers' sizes differ."""
    generator = torch.Generator().manual_seed(5)
    like = [
        NamedStatistics(
            f"layers.{i}.v_proj.weight",
            tensor_statistics(torch.randn(256, 256, generator=generator), whole=True),
        )
        for i in range(4)
    ]
    trained = [
        NamedStatistics(
            f"layers.{i}.mlp.weight",
            tensor_statistics(torch.randn(256, 256, generator=generator).pow(3), whole=True),
        )
        for i in range(4)
    ]
    assert all(
        finding.severity is Severity.OK for finding in judge([*like, *trained], "the model", sampled=True)
    )
    other = NamedStatistics(
        "layers.4.v_proj.weight",
        tensor_statistics(0.02 * torch.randn(256, 256, generator=generator), whole=True),
    )
    (finding,) = [
        one
        for one in judge([*like, other, *trained], "the model", sampled=True)
        if one.severity is not Severity.OK
    ]
    assert finding.field == other.name
