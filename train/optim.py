"""Optimiser and learning-rate schedule: Muon for matrices, AdamW for all other parameters.

Muon is by Jordan et al., 2024. Its updates are scaled as in Liu et al., arXiv 2502.16982.
"""

import time

import torch
from torch import Tensor, nn


def orthogonalise(g: Tensor, steps: int = 5) -> Tensor:
    """Approximate the semi-orthogonal matrices nearest to g [n, rows, cols].

    Runs a quintic Newton-Schulz iteration in bf16.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        s = x @ x.mT
        x = a * x + (b * s + c * s @ s) @ x
    result: Tensor = x.mT if tall else x
    return result


class Muon:
    """Updates 2-D parameters by their orthogonalised momentum.

    Parameters of equal shape are updated as one batch.
    """

    def __init__(self, params: list[nn.Parameter], momentum: float = 0.95, weight_decay: float = 0.1) -> None:
        self.groups: dict[torch.Size, list[Tensor]] = {}
        for p in params:
            self.groups.setdefault(p.shape, []).append(p)
        self.buffers = {
            shape: torch.zeros((len(ps), *shape), device=ps[0].device) for shape, ps in self.groups.items()
        }
        self.momentum, self.weight_decay = momentum, weight_decay

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Apply one update. Every parameter must have a gradient."""
        for shape, params in self.groups.items():
            grad = torch.stack([p.grad for p in params if p.grad is not None])
            buffer = self.buffers[shape]
            buffer.lerp_(grad, 1 - self.momentum)
            update = orthogonalise(grad.lerp(buffer, self.momentum)).float() * (0.2 * max(shape) ** 0.5)
            torch._foreach_mul_(params, 1 - lr * self.weight_decay)
            torch._foreach_add_(params, list(update.unbind()), alpha=-lr)


class Optimiser:
    """Muon for the matrices inside layers, and AdamW for embeddings, output heads and norms."""

    def __init__(
        self, model: nn.Module, peak_lr: float, adam_names: tuple[str, ...] = ("embed_tokens", "lm_head")
    ) -> None:
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        adam = [p for n, p in named if p.dim() != 2 or any(a in n for a in adam_names)]
        self.params = [p for _, p in named]
        self.muon = Muon([p for n, p in named if p.dim() == 2 and not any(a in n for a in adam_names)])
        self.adam = torch.optim.AdamW(
            adam, lr=peak_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=self.params[0].is_cuda
        )
        self.peak_lr = peak_lr

    def step(self, factor: float) -> None:
        """Clip the gradients, update at ``factor`` times the peak learning rate, and clear the gradients."""
        nn.utils.clip_grad_norm_(self.params, 1.0)
        for group in self.adam.param_groups:
            group["lr"] = self.peak_lr * factor
        self.adam.step()
        self.muon.step(self.peak_lr * factor)
        for p in self.params:
            p.grad = None


class Clock:
    """Training budget in steps and minutes. Training ends as soon as one of the two is used up."""

    def __init__(self, steps: int, minutes: float) -> None:
        self.steps, self.seconds = steps, minutes * 60
        self.done = 0
        self.start = time.monotonic()

    def progress(self) -> float:
        """Return the used fraction of the budget. The fraction is at least 1 when the budget is used up."""
        return max(self.done / self.steps, (time.monotonic() - self.start) / self.seconds)

    def tick(self) -> None:
        """Count one step."""
        self.done += 1

    def factor(self) -> float:
        """Return the learning-rate factor.

        The factor rises during 50 warm-up steps and is then constant. It falls linearly in the second half of
        the budget.
        """
        p = self.progress()
        return min(1.0, (self.done + 1) / 50, max(0.02, (1 - p) / 0.5))
