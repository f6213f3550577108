"""Runs all checks on a pair. An error in one check becomes a finding and does not stop the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from outrider.services.doctor.checks_config import (
    check_algorithm,
    check_aux_layers,
    check_hidden_size,
    check_rope,
    check_target,
    check_token_map_ids,
    check_tokenizers,
    check_unused,
    check_vocabulary,
)
from outrider.services.doctor.checks_tensors import (
    check_d2t,
    check_draft_tensors,
    check_embedding,
    check_target_tensors,
)
from outrider.services.doctor.finding import DoctorReport, Finding
from outrider.services.doctor.memory import check_memory, estimate_memory, memory_numbers
from outrider.services.doctor.pair import Pair
from outrider.shared.base.errors import OutriderError

Check = Callable[[Pair], Iterator[Finding]]

TARGET_CHECKS: Mapping[str, Check] = {
    "target": check_target,
    "target tensors": check_target_tensors,
}
DRAFT_CHECKS: Mapping[str, Check] = {
    "draft": check_algorithm,
    "vocabulary": check_vocabulary,
    "hidden size": check_hidden_size,
    "positions": check_rope,
    "aux layers": check_aux_layers,
    "draft vocabulary": check_d2t,
    "draft tensors": check_draft_tensors,
    "embedding": check_embedding,
}
UNDRAFTED_CHECKS: Mapping[str, Check] = {"draft": check_unused}
LAST_CHECKS: Mapping[str, Check] = {
    "token map": check_token_map_ids,
    "tokenizer": check_tokenizers,
    "memory": check_memory,
}


def examine(pair: Pair) -> DoctorReport:
    """Return the report of all checks that apply to the pair."""
    checks = {**TARGET_CHECKS, **(DRAFT_CHECKS if pair.drafts else UNDRAFTED_CHECKS), **LAST_CHECKS}
    findings: list[Finding] = []
    for name, check in checks.items():
        findings += _new(findings, [replace(finding, check=name) for finding in _run(check, pair)])
    return DoctorReport(str(pair.target), str(pair.draft or ""), tuple(findings), _numbers(pair))


def _run(check: Check, pair: Pair) -> Iterator[Finding]:
    try:
        yield from check(pair)
    except OutriderError as error:
        yield Finding.of_error(error)


def _new(known: list[Finding], found: list[Finding]) -> list[Finding]:
    """Drop repeated findings, because several checks can fail on the same unreadable file."""
    seen = {(finding.field, finding.message) for finding in known}
    return [finding for finding in found if (finding.field, finding.message) not in seen]


def _numbers(pair: Pair) -> dict[str, Mapping[str, Any]]:
    try:
        return {"memory": memory_numbers(estimate_memory(pair))}
    except OutriderError:
        return {}  # the memory check has reported the error
