"""The log line of a decision: when it is written, and what it says."""

from __future__ import annotations

from outrider.services.target.policy.verdict import LOG_INTERVAL_S, AutoReason, AutoVerdict, DecisionLog
from outrider.shared.spec.tree import DraftShape

CHAIN, TREE = DraftShape(3, 1, 4), DraftShape(5, 8, 32)
PAYS = AutoVerdict(AutoReason.PAYS, {CHAIN: 4}, 1, 5, 1.7, 0.005)
PLAIN = AutoVerdict(AutoReason.DOES_NOT_PAY, {}, 5, 5, 1.0, 0.004)


class Log:
    def __init__(self) -> None:
        self.now = 100.0
        self.lines: list[AutoVerdict] = []
        self.log = DecisionLog(lambda: self.now, self.lines.append)

    def note(self, verdict: AutoVerdict, later_s: float = 0.0) -> None:
        self.now += later_s
        self.log.note(verdict)


def test_a_line_is_written_when_the_decision_changes() -> None:
    log = Log()
    log.note(PAYS)
    log.note(PAYS, 2 * LOG_INTERVAL_S)
    log.note(AutoVerdict(AutoReason.PAYS, {CHAIN: 2}, 9, 11, 1.2, 0.005), 2 * LOG_INTERVAL_S)
    assert log.lines == [PAYS], "another number of entries is no other decision"
    log.note(AutoVerdict(AutoReason.PAYS, {TREE: 2}, 9, 11, 1.2, 0.005), 2 * LOG_INTERVAL_S)
    log.note(PLAIN, 2 * LOG_INTERVAL_S)
    assert [line.reason for line in log.lines] == [AutoReason.PAYS, AutoReason.PAYS, AutoReason.DOES_NOT_PAY]


def test_lines_are_at_least_an_interval_apart() -> None:
    log = Log()
    for step in range(100):
        log.note(PLAIN if step % 2 else PAYS, LOG_INTERVAL_S / 20)
    assert 4 <= len(log.lines) <= 6
    log.note(PLAIN, LOG_INTERVAL_S)
    log.note(PAYS, LOG_INTERVAL_S)
    assert log.lines[-1] == PAYS, "the last decision is not lost"


def test_looks_are_not_logged() -> None:
    log = Log()
    for reason in (AutoReason.PROBING, AutoReason.UNMEASURED, AutoReason.IDLE):
        log.note(AutoVerdict(reason))
    assert not log.lines


def test_the_text_names_shapes_and_entries() -> None:
    assert PAYS.text == "4 x chain 3, 1 plain"
    assert PLAIN.text == "5 plain"
    assert AutoVerdict(AutoReason.PAYS, {TREE: 2}, 0, 2).text == "2 x tree 5/8/32"
