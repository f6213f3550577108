"""Projects hidden states of the target to a drafter's features: applies norms, then the matrix ``fc``."""

from __future__ import annotations

import re

import torch

from outrider.kernels.skinny_gemm import project
from outrider.kernels.stream import MANY_ROWS
from outrider.shared.base.errors import CheckpointError
from outrider.shared.nn.decoder import DecoderOutput
from outrider.shared.nn.layers.modules import Linear, RMSNorm
from outrider.shared.spec.drafter import FeatureSpec

_FC_NORM = re.compile(r"fc_norm\.(\d+)\.weight")


class FeatureProjector:
    """Turns the target's hidden states into feature rows with a drafter's projector (norms, then ``fc``).

    Args:
        spec: Describes the features that the drafter needs, and contains the projector's tensors.
        device: Device of the target model.
        dtype: Type of the stored feature rows.
        hidden_size: Hidden size of the target. The spec must match it.
        num_layers: Number of layers of the target. The spec must match it.

    Raises:
        CheckpointError: The spec is inconsistent or does not fit the target. The error's `field` names the
            tensor or key.
    """

    def __init__(
        self,
        spec: FeatureSpec,
        device: torch.device | str,
        dtype: torch.dtype,
        *,
        hidden_size: int,
        num_layers: int,
    ) -> None:
        self.spec = spec
        self._tensors = {
            name: tensor.to(device=device, dtype=dtype) for name, tensor in spec.projector.items()
        }
        self._hidden_size = hidden_size
        _check_layers(spec, num_layers)
        width = hidden_size * (len(spec.aux_layer_ids) or 1)
        self._input_norm = self._norm("input_norm.weight", width, spec.norm_eps)
        self._fc_norms = [
            self._norm(f"fc_norm.{index}.weight", hidden_size, spec.norm_eps)
            for index in range(sum(bool(_FC_NORM.fullmatch(name)) for name in self._tensors))
        ]
        if self._fc_norms and len(self._fc_norms) != len(spec.aux_layer_ids):
            raise CheckpointError(
                f"the head has {len(self._fc_norms)} fc_norm weights "
                f"for {len(spec.aux_layer_ids)} aux layers; num_aux_hidden_states must match the checkpoint.",
                field="fc_norm",
            )
        self._fc = self._projection(width)

    def __call__(self, output: DecoderOutput) -> torch.Tensor:
        """Return the rows to store, ``[rows, feature_size]``, computed from the output of a forward pass."""
        states = self._entering(output)
        return states if self._fc is None else self._fc(states)

    def parts(self, output: DecoderOutput) -> torch.Tensor:
        """Return the feature rows to store, or their fp32 partial sums ``[splits, rows, feature_size]``.

        Partial sums are returned only on a GPU, and only for up to `MANY_ROWS` rows. The caller must add the
        partial sums.
        """
        states, fc = self._entering(output), self._fc
        if fc is None or fc.bias is not None or not states.is_cuda or states.shape[0] > MANY_ROWS:
            return states if fc is None else fc(states)
        return project(states, fc.weight)

    def _entering(self, output: DecoderOutput) -> torch.Tensor:
        """Return the input rows of ``fc``."""
        states = output.hidden if self.spec.final_hidden else output.aux
        assert states is not None, "forward() needs the spec's aux_layer_ids"
        if self._fc_norms:
            parts = states.chunk(len(self._fc_norms), dim=-1)
            states = torch.cat(
                [norm(part) for norm, part in zip(self._fc_norms, parts, strict=True) if norm is not None],
                dim=-1,
            )
        if self._input_norm is not None:
            states = self._input_norm(states)
        return states

    def _norm(self, name: str, size: int, eps: float) -> RMSNorm | None:
        weight = self._tensors.get(name)
        if weight is None and name == "input_norm.weight":
            return None
        if weight is None or tuple(weight.shape) != (size,):
            found = "missing" if weight is None else f"of shape {list(weight.shape)}"
            raise CheckpointError(
                f"{name} is {found}; this target needs [{size}]. Use a head that was trained for it.",
                field=name,
            )
        return RMSNorm(weight, eps)

    def _projection(self, width: int) -> Linear | None:
        weight = self._tensors.get("fc.weight")
        size = self.spec.feature_size
        if weight is None:
            if size != width:
                raise CheckpointError(
                    f"raw features of this target are {width} wide, but the head needs {size}; "
                    "use a head that was trained for this target.",
                    field="feature_size",
                )
            return None
        if tuple(weight.shape) != (size, width):
            raise CheckpointError(
                f"fc.weight is {list(weight.shape)}; {width // self._hidden_size} captured layers "
                f"of hidden size {self._hidden_size} need [{size}, {width}]: "
                "the head was trained for another target or another number of aux layers.",
                field="fc.weight",
            )
        bias = self._tensors.get("fc.bias")
        if bias is not None and tuple(bias.shape) != (size,):
            raise CheckpointError(
                f"fc.bias is {list(bias.shape)}, must be [{size}]; download the head again.", field="fc.bias"
            )
        return Linear(weight, bias)


def _check_layers(spec: FeatureSpec, num_layers: int) -> None:
    ids = spec.aux_layer_ids
    if spec.final_hidden == bool(ids):
        raise CheckpointError(
            "a feature spec must name either aux layers or the final hidden state, not both.",
            field="aux_layer_ids",
        )
    if list(ids) != sorted(set(ids)) or any(not 0 <= layer < num_layers for layer in ids):
        raise CheckpointError(
            f"aux layer ids {list(ids)} must be ascending, distinct and below the target's "
            f"{num_layers} layers; the head belongs to a target with more layers, "
            "or its ids count layer inputs instead of outputs.",
            field="aux_layer_ids",
        )
