"""Makes the tables of docs/performance.md, docs/numerics.md and README.md from recorded results.

The tables show the goals, the costs of options and the measurements. They are never edited by hand, so they
always match the results.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from outrider.bench.report.goals import GOALS
from outrider.bench.report.parts import ceiling_lines, kernel_lines, load_lines, start_lines
from outrider.bench.report.profile import profile_lines
from outrider.bench.report.recorded import SHAPE, PeerFigures, Results
from outrider.bench.report.runs import command_lines, run_line, within
from outrider.shared.base.errors import ConfigurationError

NOT_MEASURED = "not measured yet"
ROUND_BATCHES = (1, 4, 16, 64)
ROUND_KINDS = (
    ("plain decode", "plain", "plain"),
    ("EAGLE-3, chain of 3", "chain 3", "chain3"),
    ("EAGLE-3, chain of 5", "chain 5", "chain5"),
    ("EAGLE-3, tree 5/8/32 (no vLLM equivalent)", "tree 5/8/32", ""),
)
"""Kinds of rounds: label in the table, name in Outrider's results, configuration in vLLM's files."""
GENERIC_SHAPE = "granite-3.1-2b"
COMPILED_CASES = tuple(f"round plain, batch {batch}" for batch in (1, 16))
COST_CASES = tuple(f"round {kind}, batch {batch}" for kind in ("plain", "tree 5/8/32") for batch in (1, 16))


@dataclass(frozen=True, slots=True)
class Table:
    """A generated table, and the two marker lines around it in a document."""

    begin: str
    end: str
    lines: Callable[[Results], Iterator[str]]

    def written_into(self, text: str, results: Results) -> str:
        """Return the text with the table generated again. A text without markers is returned unchanged."""
        if self.begin not in text or self.end not in text:
            return text
        before, rest = text.split(self.begin, 1)
        made = "\n".join(self.lines(results))
        return f"{before}{self.begin}\n\n{made}\n\n{self.end}{rest.split(self.end, 1)[1]}"


def run_table(results: Path, document: Path | None, check: bool) -> int:
    """Run `outrider bench table`: print the tables, or write them between the markers in `document`.

    Raises:
        ConfigurationError: The folder of results is missing, the document has no markers for any table, or a
            result cannot be read.
    """
    if not results.is_dir():
        raise ConfigurationError(f"--results {results}: this folder does not exist.", field="--results")
    recorded = Results(results)
    if document is None:
        print(*("\n".join(table.lines(recorded)) for table in TABLES), sep="\n\n")
        return 0
    text = document.read_text(encoding="utf-8")
    if not any(table.begin in text and table.end in text for table in TABLES):
        begin, end = TABLES[0].begin, TABLES[0].end
        raise ConfigurationError(
            f"{document} has no markers for a table. Add the lines\n{begin}\n{end}", field="--document"
        )
    new = text
    for table in TABLES:
        new = table.written_into(new, recorded)
    if check:
        if new != text:
            print(
                f"{document} differs from the recorded results. "
                f"Run `outrider bench table --document {document}`.",
                file=sys.stderr,
            )
        return int(new != text)
    document.write_text(new, encoding="utf-8")
    return 0


def goal_lines(results: Results) -> Iterator[str]:
    """Yield the goals table, and then the command of every file whose figures the table shows."""
    yield "| measurement | goal | ours | floor | × floor | peer | result file |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    sources: set[Path] = set()
    peers: dict[Path, PeerFigures] = {}
    for goal in GOALS:
        figure = goal.find(results)
        if figure is None and goal.limit is None:
            continue
        if figure is None:
            yield f"| {goal.what} | {goal.text} | {NOT_MEASURED} | | | {goal.peer} | |"
            continue
        sources.add(figure.source)
        if figure.peer_source is not None:
            peers[figure.peer_source.path] = figure.peer_source
        mark = "" if goal.met(figure) else " (missed)"
        source = within(figure.source).removesuffix(".json")
        peers_of = "; ".join(filter(None, (figure.peer, goal.peer)))
        cells = (
            goal.what,
            goal.text,
            f"**{figure.text}**{mark}",
            figure.floor,
            figure.ratio,
            peers_of,
            source,
        )
        yield "| " + " | ".join(cells) + " |"
    yield from command_lines(sources)
    for path, peer in sorted(peers.items()):
        yield run_line(path, peer.command, peer.provenance)


def cost_lines(results: Results) -> Iterator[str]:
    """Yield the table that shows the cost of `--deterministic`."""
    return _changed_lines(results, "deterministic", {"deterministic": "true"}, COST_CASES, SHAPE)


def compile_lines(results: Results) -> Iterator[str]:
    """Yield the table of the gain from `--enable-torch-compile`, for a model of transformers' modules."""
    return _changed_lines(
        results, "compiled", {"enable_torch_compile": "true"}, COMPILED_CASES, GENERIC_SHAPE
    )


def _changed_lines(
    results: Results, changed: str, changes: Mapping[str, str], cases: Sequence[str], shape: str
) -> Iterator[str]:
    """Yield a table that compares rounds with a changed setting to the nearest run without the change."""
    yield f"| round | default | {changed} | ratio |"
    yield "| --- | --- | --- | --- |"
    sources: set[Path] = set()
    for case in cases:
        with_it = results.latency(case, changes=changes, shape=shape)
        usual = with_it and results.latency(case, near=with_it[0], shape=shape)
        if with_it is None or usual is None:
            yield f"| {case.removeprefix('round ')} | {NOT_MEASURED} | | |"
            continue
        sources |= {with_it[0].path, usual[0].path}
        before, after = float(usual[1]["value"]), float(with_it[1]["value"])
        yield f"| {case.removeprefix('round ')} | {before:.2f} ms | {after:.2f} ms | {after / before:.2f} |"
    yield from command_lines(sources)


def time_lines(results: Results) -> Iterator[str]:
    """Yield the table of GPU time in a round, and the command of the run whose file lists every kernel."""
    recorded = results.profiled()
    if recorded is None:
        yield f"The GPU time of a round is {NOT_MEASURED}."
        return
    yield from profile_lines(recorded)
    yield from command_lines({recorded.path})


def round_lines(results: Results) -> Iterator[str]:
    """Yield the lines of a table that compares rounds of Outrider and vLLM. The table links to result files.

    The links are relative to the README, which is one folder above the documents.
    """
    yield ("| ms per round, ours / vLLM | " + " | ".join(f"batch {batch}" for batch in ROUND_BATCHES) + " |")
    yield "| --- |" + " --- |" * len(ROUND_BATCHES)
    sources: dict[Path, None] = {}
    for what, kind, config in ROUND_KINDS:
        cells = []
        for batch in ROUND_BATCHES:
            peer = results.vllm(config, batch)
            found = results.latency(f"round {kind}, batch {batch}", beside=peer and peer[0])
            ours = "" if found is None else f"{float(found[1]['value']):.2f}"
            cells.append(f"{ours} / {float(peer[1]['ms_round']):.2f}" if ours and peer else ours)
            if found is not None:
                sources[found[0].path] = None
        yield f"| {what} | {' | '.join(cells)} |"
    yield ""
    yield "Sources: " + ", ".join(f"[{within(path)}](bench/results/{within(path)})" for path in sources) + "."


TABLES = (
    Table(
        "<!-- performance table: made by `outrider bench table` -->",
        "<!-- end of the performance table -->",
        goal_lines,
    ),
    Table(
        "<!-- cost of --deterministic: made by `outrider bench table` -->",
        "<!-- end of that cost -->",
        cost_lines,
    ),
    Table(
        "<!-- gain of --enable-torch-compile: made by `outrider bench table` -->",
        "<!-- end of that gain -->",
        compile_lines,
    ),
    Table(
        "<!-- time of a round: made by `outrider bench table` -->", "<!-- end of that time -->", time_lines
    ),
    Table("<!-- ceilings: made by `outrider bench table` -->", "<!-- end of the ceilings -->", ceiling_lines),
    Table("<!-- kernels: made by `outrider bench table` -->", "<!-- end of the kernels -->", kernel_lines),
    Table("<!-- starts: made by `outrider bench table` -->", "<!-- end of the starts -->", start_lines),
    Table("<!-- load: made by `outrider bench table` -->", "<!-- end of the load -->", load_lines),
    Table("<!-- rounds: made by `outrider bench table` -->", "<!-- end of the rounds -->", round_lines),
)
