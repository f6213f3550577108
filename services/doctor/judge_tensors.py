"""What the statistics of a model's tensors give away: damaged, never filled, or still as before training."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from outrider.services.doctor.finding import Finding
from outrider.services.doctor.statistics import NEAR_ZERO, TensorStatistics

MAX_NAMED = 4
NORM_ENDING = "norm.weight"
TRAINED = "Check that this is a trained export."
DOWNLOAD = "Download the checkpoint again, or take another export of it."
UNTRAINED_SHARE = 0.8
"""Share of the projections that look initialised, from which on a head counts as untrained, however small its tensors are."""
OTHER_SIZE = 1.5
"""Factor between the deviations of one tensor and of its like in other layers that initialisation explains and training does not."""
MIN_SIBLINGS = 3
NORM_NEGATIVES = 0.25
"""Share of negative weights that no trained norm has; numbers drawn around zero have half."""


@dataclass(frozen=True, slots=True)
class Examined:
    """A tensor's name and what was found out about it."""

    name: str
    statistics: TensorStatistics

    @property
    def is_norm(self) -> bool:
        """Whether it is the weight of a norm."""
        return self.name.endswith(NORM_ENDING) or "norm." in self.name


def judge(
    examined: Sequence[Examined], whose: str, *, sampled: bool, norms_about_one: bool = True
) -> Iterator[Finding]:
    """Say what is wrong with the tensors of a model.

    Args:
        examined: All of them, or a sample.
        whose: ``the head``, for the lines.
        sampled: Of a model of many layers; its tensors are compared with their like in other layers before one is suspected alone.
        norms_about_one: A norm multiplies by its weight; in some families by 1 + its weight, which may then be anything.
    """
    broken = [one.name for one in examined if not one.statistics.finite]
    if broken:
        yield Finding.refused(broken[0], f"{named(broken)} with NaN or infinite numbers", DOWNLOAD)
    weights = [
        one for one in examined if one.statistics.finite and not one.is_norm and one.statistics.columns
    ]
    flat = [one.name for one in weights if one.statistics.std < NEAR_ZERO and not one.name.endswith(".bias")]
    if flat:
        yield Finding.warning(
            flat[0], f"{named(flat)} with a standard deviation under {NEAR_ZERO:g}: never filled", DOWNLOAD
        )
    yield from _norms(
        [one for one in examined if one.statistics.finite and one.is_norm], whose, norms_about_one
    )
    yield from _untrained(weights, whose, sampled=sampled)
    if not broken and not flat:
        seen = (
            f"a sample of {len(examined)} tensors" if sampled else f"every number of {len(examined)} tensors"
        )
        yield Finding.ok("weights", f"{seen} of {whose} is finite")


def named(names: Sequence[str]) -> str:
    """Return the number of tensors and the first few names."""
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return f"{len(names)} tensor{'s' if len(names) > 1 else ''} ({', '.join(names[:MAX_NAMED])}{more})"


def _norms(norms: Sequence[Examined], whose: str, about_one: bool) -> Iterator[Finding]:
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
            f"{named(same)}: all numbers of a norm are the same, and those of the others are not",
            TRAINED,
        )
    around_zero = [
        one.name for one in norms if one.statistics.negative > NORM_NEGATIVES and not one.statistics.constant
    ]
    if around_zero:
        yield Finding.warning(
            around_zero[0],
            f"{named(around_zero)}: a norm whose weights scatter around zero was never trained",
            TRAINED,
        )


def _untrained(weights: Sequence[Examined], whose: str, *, sampled: bool) -> Iterator[Finding]:
    """Name what looks drawn by an initialisation: nearly all projections together, or single ones that are large enough to tell."""
    looks = {one.name: look for one in weights if (look := one.statistics.looks_initialised)}
    if looks and len(looks) >= UNTRAINED_SHARE * len(weights):
        name, look = next(iter(looks.items()))
        yield Finding.warning(
            name,
            f"{len(looks)} of {len(weights)} projections of {whose} look like a fresh initialisation, e.g. {name}: {look}, rows all alike",
            f"{TRAINED} --probe measures it: an untrained head has accept length 1.0.",
        )
        return
    large = [one for one in weights if one.name in looks and one.statistics.telling]
    groups = _groups(weights)
    for one in large:
        if sampled and not _differs(one, groups[_group(one.name)], looks[one.name]):
            continue
        yield Finding.warning(
            one.name,
            f"looks like a fresh initialisation among the trained tensors of {whose}: {looks[one.name]}, independent numbers, rows and "
            "columns all alike",
            f"{TRAINED} Lightly trained tensors can look so too; --probe measures what the pair is worth.",
        )


def _differs(one: Examined, group: Sequence[Examined], look: str) -> bool:
    """Whether a tensor that looks initialised stands out of its like in other layers: small models leave some nearly as they began."""
    others = [other for other in group if other is not one and other.statistics.std > NEAR_ZERO]
    if not look.startswith("normal"):
        return not any(other.statistics.looks_initialised == look for other in others)
    if len(others) < MIN_SIBLINGS:
        return not group[1:]
    ratio = one.statistics.std / median(other.statistics.std for other in others)
    return not 1 / OTHER_SIZE < ratio < OTHER_SIZE


def _groups(weights: Sequence[Examined]) -> Mapping[str, list[Examined]]:
    groups: dict[str, list[Examined]] = {}
    for one in weights:
        groups.setdefault(_group(one.name), []).append(one)
    return groups


def _group(name: str) -> str:
    """Return what a tensor shares its name with in other layers and experts."""
    return re.sub(r"\.\d+\.", ".*.", name)
