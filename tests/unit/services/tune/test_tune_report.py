"""What `outrider tune` prints: the announcement at the start, the table, and a warning below the table."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from outrider.services.stack.options import StackOptions
from outrider.services.tune.candidates import AutoLimits
from outrider.services.tune.command import TuneOptions, introduction
from outrider.services.tune.report import print_result, result_json, slower_note
from outrider.services.tune.result import BatchResult, Check, TuneResult
from outrider.shared.base.generation import SpeculationMode
from outrider.shared.spec.tree import NO_DRAFT, DraftShape

CHAIN, TREE, WIDE = DraftShape(10, 1, 11), DraftShape(10, 8, 16), DraftShape(12, 8, 64)


def batch(number: int, chain: float, tree: float | None = None) -> BatchResult:
    """Return a result in which the chain and perhaps a tree were measured relative to 100 tokens/s."""
    measured = {NO_DRAFT: 100.0, CHAIN: 100 * chain} | ({} if tree is None else {TREE: 100 * tree})
    return BatchResult(number, {CHAIN: chain, TREE: 0.5, WIDE: 0.7}, measured)


def result(*batches: BatchResult) -> TuneResult:
    return TuneResult({CHAIN: 6.5, TREE: 5.0, WIDE: 6.0}, batches)


def test_mode_auto_has_a_row_and_the_mode_a_line() -> None:
    speeds = replace(batch(1, 1.75), auto=160.0)
    found = TuneResult({CHAIN: 6.5, TREE: 5.0, WIDE: 6.0}, [speeds], 0, AutoLimits(12, 8, 64))
    lines = printed(found, 100)
    assert next(line for line in lines if line.startswith("auto")).split()[1] == "1.60"
    assert "best mode: auto, with shapes up to tree 12/8/64" in lines
    won = replace(speeds, to_auto={CHAIN: [1.09, 1.1], NO_DRAFT: [0.6, 0.6]})
    assert "best mode: on, with chain 10" in printed(replace(found, batches=[won]), 100)
    lost = replace(batch(1, 0.8), auto=99.0, to_auto={CHAIN: [0.8], NO_DRAFT: [1.01]})
    assert "best mode: off" in printed(replace(found, batches=[lost]), 100)


def test_a_prediction_alone_recommends_no_draft() -> None:
    slow = batch(1, 0.9)
    predicted = replace(batch(4, 0.9), predicted={CHAIN: 0.9, TREE: 1.5, WIDE: 0.7})
    found = result(replace(slow, measured={**slow.measured, TREE: 80.0}), predicted)
    assert (found.shape, found.mode) == (NO_DRAFT, SpeculationMode.OFF)


def printed(found: TuneResult, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    print_result(found, console)
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_the_duration_is_compared_with_that_of_an_exhaustive_search() -> None:
    one = replace(batch(1, 1.75), seconds=19.0, exhaustive_s=290.0)
    lines = printed(result(one), 100)
    assert lines[-1] == "searched for 19 s: about 6.6% of the 290 s that measuring every shape takes"
    checked = replace(one, check=Check(CHAIN, TREE, [0.98, 1.01, 0.99], 95.0))
    lines = printed(result(checked), 200)
    assert lines[-1] == "searched for 19 s: 6.6% of the 290 s that measuring every shape takes"
    assert lines[-2] == (
        "1 at a time: chain 10 has 99.0% of the speed of tree 10/8/16, the best of all shapes "
        "(median of 3 passes, 98.0% to 101.0%)"
    )
    assert printed(result(replace(one, seconds=290.0)), 100)[-1] == "searched for 290 s"
    (found,) = result_json(result(checked))["batches"]
    assert (found["exhaustive_seconds"], found["share_of_exhaustive"]) == (290.0, 0.0655)
    assert (found["check"]["ratio"], found["check"]["best_of_all"]) == (0.99, "tree 10/8/16")


@pytest.mark.parametrize("width", [80, 100, 200])
@pytest.mark.parametrize("numbers", [(1,), (1, 4, 16), (1, 2, 4, 8, 16, 32)])
def test_each_shape_has_one_line(width: int, numbers: tuple[int, ...]) -> None:
    lines = printed(result(*(batch(number, 1.75, 0.8) for number in numbers)), width)
    table = lines[: lines.index("best shape for these numbers of requests: chain 10")]
    assert max(map(len, table)) <= width
    rows = {line.split("  ")[0]: line for line in table[2:]}
    assert list(rows) == ["plain", "chain 10", "tree 10/8/16", "tree 12/8/64"]
    assert rows["chain 10"].count(" 1.75") == rows["tree 12/8/64"].count("~0.70") == len(numbers)
    if len(numbers) <= 3:
        # The longest bars stand for the fastest shape.
        assert rows["chain 10"].count("█") > 2 * rows["tree 10/8/16"].count("█") > 0


def test_a_shape_that_is_slower_somewhere_is_named_with_the_numbers_of_requests() -> None:
    found = result(batch(1, 1.75), batch(4, 0.78), batch(16, 0.4, 0.996))
    assert slower_note(found) == (
        "chain 10 is slower than plain decoding for these numbers of requests at a time: 4 (0.78 ×), "
        "16 (0.40 ×). There, mode auto decodes plainly or with a smaller shape."
    )
    assert slower_note(found) in " ".join(printed(found, 100))
    assert slower_note(result(batch(1, 1.75), batch(4, 1.0))) == ""
    assert slower_note(result(batch(1, 0.9))) == "", "drafting is not recommended at all"


def test_the_start_says_what_is_measured_how_long_it_takes_and_where_the_profile_goes(
    tmp_path: Path,
) -> None:
    options = TuneOptions(StackOptions(), tmp_path / "profile.toml")
    what, how_long, where = introduction(options, 12)
    assert "12 prompts, with answers of up to 64 tokens, for 1, 4 and 16 requests at a time." in what
    assert "two to four minutes" in how_long
    assert where == f"The profile goes to {options.output}."
    options.output.write_text("")
    assert introduction(options, 12)[-1].endswith("which exists and is overwritten.")
    thorough = replace(options, batches=(8,), exhaustive=True, check=9)
    assert "every tree shape on 12 prompts" in introduction(thorough, 12)[0]
    assert "for 8 requests at a time. --check adds" in introduction(thorough, 12)[0]
