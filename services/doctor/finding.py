"""Data types of the report: one `Finding` per result of a check, and the `DoctorReport` of all findings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from outrider.shared.base.errors import OutriderError


class Severity(Enum):
    """Severity of one finding of `outrider doctor`.

    Attributes:
        OK: The result is as expected, or the finding is only information.
        WARNING: Target and draft can be served, but perhaps with poor speed or quality.
        REFUSED: The services would refuse to start with this target and draft.
    """

    OK = "ok"
    WARNING = "warning"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report of `outrider doctor`.

    Attributes:
        severity: Severity of the finding.
        field: The config key, tensor, file or flag that the finding is about.
        message: The observation, with the observed values.
        fix: Suggested fix. Empty for a finding with severity OK.
        check: Name of the check that made the finding. `examine` fills in this name.
    """

    severity: Severity
    field: str
    message: str
    fix: str = ""
    check: str = ""

    @classmethod
    def ok(cls, field: str, message: str) -> Finding:
        """Return a finding that requires no action."""
        return cls(Severity.OK, field, message)

    @classmethod
    def warning(cls, field: str, message: str, fix: str) -> Finding:
        """Return a finding about a pair that can be served, but perhaps not well."""
        return cls(Severity.WARNING, field, message, fix)

    @classmethod
    def refused(cls, field: str, message: str, fix: str = "") -> Finding:
        """Return a finding that keeps the pair from being served."""
        return cls(Severity.REFUSED, field, message, fix)

    @classmethod
    def of_error(cls, error: OutriderError) -> Finding:
        """Return the finding for an error raised while loading. The error's message includes the fix."""
        return cls.refused(error.field or error.reason, error.message)

    def as_json(self) -> dict[str, str]:
        """Return the finding as a JSON object."""
        return {
            "check": self.check,
            "severity": self.severity.value,
            "field": self.field,
            "message": self.message,
            "fix": self.fix,
        }


@dataclass(frozen=True, slots=True)
class DoctorReport:
    """All findings of `outrider doctor` about a target and a draft.

    Attributes:
        target, draft: Folders of the target and the draft. `draft` is empty if there is no draft.
        findings: Findings in the order of the checks.
        numbers: Numbers for scripts: section of the report (``memory`` or ``probe``) → name → number.
    """

    target: str
    draft: str
    findings: Sequence[Finding]
    numbers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def severity(self) -> Severity:
        """The highest severity of all findings."""
        found = {finding.severity for finding in self.findings}
        return next(
            (severity for severity in (Severity.REFUSED, Severity.WARNING) if severity in found), Severity.OK
        )

    @property
    def exit_code(self) -> int:
        """Exit code: 0 if the pair can be served, perhaps with warnings, or 2 if it would be refused."""
        return 2 if self.severity is Severity.REFUSED else 0

    def as_json(self) -> dict[str, Any]:
        """Return the report as a JSON object."""
        return {
            "target": self.target,
            "draft": self.draft,
            "verdict": self.severity.value,
            "findings": [finding.as_json() for finding in self.findings],
            **self.numbers,
        }
