"""What a check says, and the report of all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from outrider.shared.base.errors import OutriderError


class Severity(Enum):
    """OK: as it should be, or good to know. WARNING: serves, but maybe not well. REFUSED: would not start."""

    OK = "ok"
    WARNING = "warning"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Attributes:
        severity: How bad it is.
        field: The config key, tensor, file or flag that it is about.
        message: What was seen, with the values.
        fix: What to do; empty for OK.
        check: Name of the check, filled in by the report.
    """

    severity: Severity
    field: str
    message: str
    fix: str = ""
    check: str = ""

    @classmethod
    def ok(cls, field: str, message: str) -> Finding:
        """Return a line that needs nothing done."""
        return cls(Severity.OK, field, message)

    @classmethod
    def warning(cls, field: str, message: str, fix: str) -> Finding:
        """Return a line about something that serves, but maybe badly."""
        return cls(Severity.WARNING, field, message, fix)

    @classmethod
    def refused(cls, field: str, message: str, fix: str = "") -> Finding:
        """Return a line about something that keeps the pair from being served."""
        return cls(Severity.REFUSED, field, message, fix)

    @classmethod
    def of_error(cls, error: OutriderError) -> Finding:
        """Return the line that an error of loading becomes; its message says what to do."""
        return cls.refused(error.field or error.reason, error.message)

    def as_json(self) -> dict[str, str]:
        """Return it for scripts."""
        return {
            "check": self.check,
            "severity": self.severity.value,
            "field": self.field,
            "message": self.message,
            "fix": self.fix,
        }


@dataclass(frozen=True, slots=True)
class DoctorReport:
    """All findings about a pair.

    Attributes:
        target, draft: The folders; draft is empty without one.
        findings: In the order of the checks.
        numbers: What scripts may want beside the lines: section (``memory``, ``probe``) → name → value.
    """

    target: str
    draft: str
    findings: Sequence[Finding]
    numbers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def severity(self) -> Severity:
        """The worst of the findings."""
        found = {finding.severity for finding in self.findings}
        return next(
            (severity for severity in (Severity.REFUSED, Severity.WARNING) if severity in found), Severity.OK
        )

    @property
    def exit_code(self) -> int:
        """0: the pair can be served, maybe with warnings. 2: it would be refused."""
        return 2 if self.severity is Severity.REFUSED else 0

    def as_json(self) -> dict[str, Any]:
        """Return it for scripts."""
        return {
            "target": self.target,
            "draft": self.draft,
            "verdict": self.severity.value,
            "findings": [finding.as_json() for finding in self.findings],
            **self.numbers,
        }
