"""Continues prompts with the target itself, so that the head trains on the text that it must predict."""

import torch
from torch import Tensor

from outrider.train.forms import FormedAnswers, restricted
from outrider.train.model import Llama
from outrider.train.tokenizer import START_ID


def cut_points(
    rows: Tensor, generator: torch.Generator, assistant_id: int, header: int, latest: int
) -> Tensor:
    """Choose for each row of tokens how many tokens to keep. The target generates the rest of the row.

    Seven of ten rows are cut after their first assistant header. The others are cut after a random assistant
    header.

    Args:
        rows: [n, length] conversations.
        generator: CPU generator for the choices.
        assistant_id: First token of the word ``assistant``.
        header: Number of tokens in ``<|im_start|>assistant\\n``.
        latest: Largest number of tokens to keep.

    Returns:
        [n] int64: number of leading tokens to keep.
    """
    cuts = []
    first_only = torch.rand(len(rows), generator=generator) < 0.7
    picks = torch.rand(len(rows), generator=generator)
    for row, first, pick in zip(rows, first_only.tolist(), picks.tolist(), strict=True):
        starts = (row == START_ID).nonzero().flatten().tolist()
        roles = [int(row[s + 1]) if s + 1 < len(row) else -1 for s in starts]
        assistants = [
            s + header
            for s, role in zip(starts, roles, strict=True)
            if role == assistant_id and s + header <= latest
        ] or [latest]
        cuts.append(assistants[0] if first else assistants[int(pick * len(assistants))])
    return torch.tensor(cuts)


@torch.no_grad()
def continue_rows(
    model: Llama,
    rows: Tensor,
    cuts: Tensor,
    temperature: Tensor,
    seed: int,
    answers: FormedAnswers | None = None,
) -> tuple[Tensor, Tensor]:
    """Keep ``rows[i, :cuts[i]]`` and sample the rest of each row with the target.

    Sampling does not stop at an end of turn.

    Args:
        model: The target, on its device.
        rows: [n, length] int64.
        cuts: [n] int64, number of tokens to keep in each row, at least 1.
        temperature: [n] fp32, temperature of each row. 0 means greedy.
        seed: Seed of the sampling.
        answers: The forms of the answers, or None if the target may write any text.

    Returns:
        The rows [n, length] int64. For each position, the number of the set of tokens that was allowed at the
        next position, [n, length] int32. Number 0 allows all tokens.
    """
    n, length = rows.shape
    device = rows.device
    generator = torch.Generator(device).manual_seed(seed)
    cache = model.new_cache(n, length, model.model.embed_tokens.weight.dtype)
    out = rows.clone()
    allowed = torch.zeros(n, length, dtype=torch.int32, device=device)
    scale = temperature.clamp_min(1e-3)[:, None]
    noisy = (temperature > 0).float()[:, None]
    for t in range(length - 1):
        logits, _ = model(out[:, t : t + 1], cache, t)
        if answers is not None:
            allowed[:, t] = torch.tensor(answers.follow(t, out[:, t].tolist()), device=device)
            logits = restricted(logits, allowed[:, t : t + 1], answers.sets.table)
        uniform = torch.rand(n, logits.shape[-1], device=device, generator=generator).clamp_min(1e-10)
        gumbel = -torch.log((-torch.log(uniform)).clamp_min(1e-10))
        sampled = (logits[:, 0].float() / scale + noisy * gumbel).argmax(-1)
        out[:, t + 1] = torch.where(t + 1 < cuts, out[:, t + 1], sampled)
    return out, allowed
