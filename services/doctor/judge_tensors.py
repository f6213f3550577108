"""Judges tensor statistics: finds weights that are damaged, were never filled, or were never trained."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from outrider.services.doctor.finding import Finding
from outrider.services.doctor.statistics import NEAR_ZERO, TensorStatistics

MAX_NAMED = 4
NORM_ENDING = "norm.weight"
SCALE_ENDINGS = ("_scale", "_scale_inv", "_scales")
TRAINED = "Check that this is a trained export."
DOWNLOAD = "Download the checkpoint again, or take another export of it."
UNTRAINED_SHARE = 0.8
"""A model counts as untrained if at least this share of its projections look freshly initialised."""
OTHER_SIZE = 1.5
"""Least factor between the standard deviations of a tensor and of the same tensor in other layers, from which
the tensor counts as different."""
MIN_SIBLINGS = 3
NORM_NEGATIVES = 0.25
"""Share of negative weights above which a norm counts as untrained. For random weights, the share is 0.5."""


@dataclass(frozen=True, slots=True)
class NamedStatistics:
    """A tensor's name and its statistics."""

    name: str
    statistics: TensorStatistics

    @property
    def is_norm(self) -> bool:
        """True if the tensor is the weight of a norm."""
        return self.name.endswith(NORM_ENDING) or "norm." in self.name


def judge(
    examined: Sequence[NamedStatistics], whose: str, *, sampled: bool, norms_about_one: bool = True
) -> Iterator[Finding]:
    """Report damaged or untrained tensors of a model.

    Args:
        examined: Statistics of all tensors of the model, or of a sample of its tensors.
        whose: The model's name for the messages, such as ``the head``.
        sampled: True if `examined` contains only some tensors of a model with many layers. A tensor is then
            reported only if it differs from the same tensor in other layers.
        norms_about_one: True if the model's norms multiply by their weights. These weights should then be
            close to 1. False if the norms multiply by 1 + weight. Such weights may have any sign.
    """
    broken = [one.name for one in examined if not one.statistics.finite]
    if broken:
        yield Finding.refused(broken[0], f"{count_and_names(broken)} with NaN or infinite values", DOWNLOAD)
    weights = [
        one for one in examined if one.statistics.finite and not one.is_norm and one.statistics.columns
    ]
    # Scales of FP8 weights are tiny numbers that may all be equal. Only scales that are all 0 are wrong.
    scales = [one for one in weights if one.name.endswith(SCALE_ENDINGS)]
    weights = [one for one in weights if not one.name.endswith(SCALE_ENDINGS)]
    flat = [one.name for one in weights if one.statistics.std < NEAR_ZERO and not one.name.endswith(".bias")]
    flat += [one.name for one in scales if one.statistics.constant and one.statistics.mean == 0.0]
    if flat:
        yield Finding.warning(
            flat[0],
            f"{count_and_names(flat)} never filled: the standard deviation is below {NEAR_ZERO:g}",
            DOWNLOAD,
        )
    yield from _norms(
        [one for one in examined if one.statistics.finite and one.is_norm], whose, norms_about_one
    )
    yield from _untrained(weights, whose, sampled=sampled)
    if not broken and not flat:
        seen = f"a sample of {len(examined)} tensors" if sampled else f"all values of {len(examined)} tensors"
        yield Finding.ok("weights", f"{seen} of {whose}: no NaN or infinite values")


def count_and_names(names: Sequence[str]) -> str:
    """Return the number of tensors and the first few names, for messages."""
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return f"{len(names)} tensor{'s' if len(names) > 1 else ''} ({', '.join(names[:MAX_NAMED])}{more})"


def _norms(norms: Sequence[NamedStatistics], whose: str, about_one: bool) -> Iterator[Finding]:
    ones = [one.name for one in norms if one.statistics.constant and one.statistics.mean == 1.0]
    if ones and len(ones) == len(norms):
        yield Finding.warning(
            ones[0], f"all {len(norms)} norm weights of {whose} are exactly 1, as before training", TRAINED
        )
        return
    if not about_one:
        return
    same = [one.name for one in norms if one.statistics.constant]
    if same:
        yield Finding.warning(
            same[0],
            f"{count_and_names(same)}: all weights of the norm are equal, unlike those of the other norms",
            TRAINED,
        )
    around_zero = [
        one.name for one in norms if one.statistics.negative > NORM_NEGATIVES and not one.statistics.constant
    ]
    if around_zero:
        yield Finding.warning(
            around_zero[0],
            f"{count_and_names(around_zero)}: "
            "norm weights scatter around zero, so the norm was never trained",
            TRAINED,
        )


def _untrained(weights: Sequence[NamedStatistics], whose: str, *, sampled: bool) -> Iterator[Finding]:
    """Report projections that look freshly initialised: almost all projections, or single large ones."""
    looks = {one.name: look for one in weights if (look := one.statistics.looks_initialised)}
    if looks and len(looks) >= UNTRAINED_SHARE * len(weights):
        name, look = next(iter(looks.items()))
        yield Finding.warning(
            name,
            f"{len(looks)} of {len(weights)} projections of {whose} look freshly initialised, e.g. {name}: "
            f"{look}, all rows alike",
            f"{TRAINED} --probe measures the accept length, which is 1.0 for an untrained head.",
        )
        return
    large = [one for one in weights if one.name in looks and one.statistics.is_large]
    groups = _groups(weights)
    for one in large:
        if sampled and not _differs(one, groups[_group(one.name)], looks[one.name]):
            continue
        yield Finding.warning(
            one.name,
            f"looks freshly initialised, unlike the other tensors of {whose}: {looks[one.name]}, independent "
            "numbers, all rows and columns alike",
            f"{TRAINED} Lightly trained tensors can also look like this; --probe measures the accept length.",
        )


def _differs(one: NamedStatistics, group: Sequence[NamedStatistics], look: str) -> bool:
    """Return True if a tensor that looks untrained differs from the same tensor in other layers.

    In small models, training leaves some tensors almost unchanged in all layers. A tensor that resembles the
    same tensor in other layers is therefore not suspicious.
    """
    others = [other for other in group if other is not one and other.statistics.std > NEAR_ZERO]
    if not look.startswith("normal"):
        return not any(other.statistics.looks_initialised == look for other in others)
    if len(others) < MIN_SIBLINGS:
        return not group[1:]
    ratio = one.statistics.std / median(other.statistics.std for other in others)
    return not 1 / OTHER_SIZE < ratio < OTHER_SIZE


def _groups(weights: Sequence[NamedStatistics]) -> Mapping[str, list[NamedStatistics]]:
    groups: dict[str, list[NamedStatistics]] = {}
    for one in weights:
        groups.setdefault(_group(one.name), []).append(one)
    return groups


def _group(name: str) -> str:
    """Return a tensor's name with `*` in place of its layer number and its expert number."""
    return re.sub(r"\.\d+\.", ".*.", name)
