"""Finds the allowed next tokens of many outputs at once."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from outrider.services.target.grammar.form import OutputForm
from outrider.services.target.grammar.guidance import GuidanceMatcher, fill_together
from outrider.services.target.grammar.matcher import Mask


def fill_all(work: Seq[tuple[OutputForm, Mask]]) -> None:
    """Write the allowed next tokens of different forms, each to its own mask, ``[words] int32``."""
    together: list[tuple[GuidanceMatcher, Mask]] = []
    for form, mask in work:
        matcher = form.matcher
        if isinstance(matcher, GuidanceMatcher):
            together.append((matcher, mask))
        else:
            form.fill(mask)
    fill_together(together)
