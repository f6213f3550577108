"""The table of docs/performance.md: what was promised, and what recorded results say. Never typed by hand, so that it cannot drift."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.shared.base.errors import ConfigurationError

BEGIN, END = "<!-- performance table: made by `outrider bench table` -->", "<!-- end of the performance table -->"
NOT_MEASURED = "not measured yet"
SHAPE = "llama3.1-8b"


@dataclass(frozen=True, slots=True)
class Recorded:
    """One file of results."""

    path: Path
    content: Mapping[str, Any]

    @property
    def date(self) -> str:
        """When it was measured; sorts by time."""
        return str(self.content.get("date", ""))

    def settings(self, name: str) -> Any:
        """Return one of its settings, or None."""
        return self.content.get("settings", {}).get(name)

    def row(self, case: str) -> Mapping[str, Any] | None:
        """Return the figures of a case, or None."""
        return next((row for row in self.content.get("rows", ()) if row.get("case") == case), None)


@dataclass(frozen=True, slots=True)
class Figure:
    """What was measured for a goal.

    Attributes:
        value: In the goal's unit.
        text: As it is shown.
        source: Where it is recorded.
        floor, ratio: Of the measured row, as shown; empty where there is none.
        peer: The peer's figure of the same call, as shown; empty without one.
    """

    value: float
    text: str
    source: Path
    floor: str = ""
    ratio: str = ""
    peer: str = ""


@dataclass(frozen=True, slots=True)
class Goal:
    """A row of the table: `limit` is the most (or, with `at_least`, the least) that `find`'s figure may be."""

    what: str
    limit: float
    text: str
    find: Callable[[Results], Figure | None]
    at_least: bool = False
    peer: str = ""

    def met(self, figure: Figure) -> bool:
        """Whether the figure is on the right side of the limit."""
        return figure.value >= self.limit if self.at_least else figure.value <= self.limit


class Results:
    """All recorded results of a folder on one kind of device; of several that fit, the latest counts.

    Raises:
        ConfigurationError: A file is not JSON.
    """

    def __init__(self, folder: Path) -> None:
        files = [Recorded(path, _read(path)) for path in sorted(folder.glob("*.json"))]
        self._files = sorted(files, key=lambda recorded: recorded.date, reverse=True)
        self._peers = [_read_lines(path) for path in sorted(folder.glob("vllm*.jsonl"), reverse=True)]

    def latency(self, case: str, needs: str = "value", **settings: Any) -> tuple[Recorded, Mapping[str, Any]] | None:
        """Return the latest file of `outrider bench latency` on a GPU that has the case, and its row.

        Args:
            case: Of the row.
            needs: What the row must tell.
            settings: Of the run; in process, on one GPU, unless they say otherwise.
        """
        here = {"shape": SHAPE, "prompt": 512, "new_tokens": 384, "draft_device": None, "tp": None}
        wanted = {name: (value,) for name, value in (here | settings).items()}
        return self._latest("latency", case, {"transport": ("inproc", "none"), **wanted}, needs)

    def kernels(self, case: str) -> tuple[Recorded, Mapping[str, Any]] | None:
        """Return the same of `outrider bench kernels`."""
        return self._latest("kernels", case, {"shape": (SHAPE,)}, "value")

    def summary(self, name: str) -> tuple[Recorded, Mapping[str, Any]] | None:
        """Return the greedy summary of the latest `outrider bench speculation` that was recorded in `name`."""
        for recorded in self._files:
            if recorded.path.name == name and recorded.content.get("summary"):
                return recorded, recorded.content["summary"][0]
        return None

    def vllm(self, config: str, batch: int) -> Mapping[str, Any] | None:
        """Return the first run of a configuration of vLLM's, of the last file that has it (``vllm*.jsonl``, as its script wrote them)."""
        wanted = {"case": "run", "config": config, "bs": batch}
        return next((line for lines in self._peers for line in lines if wanted.items() <= line.items()), None)

    def _latest(
        self, benchmark: str, case: str, settings: Mapping[str, tuple[Any, ...]], needs: str
    ) -> tuple[Recorded, Mapping[str, Any]] | None:
        for recorded in self._files:
            if recorded.content.get("benchmark") != benchmark or not str(recorded.settings("device")).startswith("cuda"):
                continue
            row = recorded.row(case)
            fits = all(recorded.settings(name) in allowed for name, allowed in settings.items())
            if fits and row is not None and row.get(needs) is not None:
                return recorded, row
        return None


def _round(case: str, **settings: Any) -> Callable[[Results], Figure | None]:
    """Milliseconds of a round."""

    def find(results: Results) -> Figure | None:
        found = results.latency(f"round {case}", **settings)
        return _figure(found) if found else None

    return find


def _plain(case: str, **settings: Any) -> Callable[[Results], Figure | None]:
    def find(results: Results) -> Figure | None:
        found = results.latency(f"round {case}", **settings)
        if found is None:
            return None
        peer = results.vllm("plain", int(found[1]["batch"]))
        return _figure(found, peer=f"vLLM {peer['ms_round']:.2f} ms" if peer else "")

    return find


def _kernel(case: str) -> Callable[[Results], Figure | None]:
    """A kernel's figure, in milliseconds."""

    def find(results: Results) -> Figure | None:
        found = results.kernels(case)
        if found is None:
            return None
        row = dict(found[1])
        if row["unit"] == "us":
            row |= {"unit": "ms", "value": row["value"] / 1e3, "floor": None if row["floor"] is None else row["floor"] / 1e3}
        return _figure((found[0], row))

    return find


def _against_vllm(kind: str, batch: int, config: str, metric: str) -> Callable[[Results], Figure | None]:
    """Our figure over vLLM's of the same kind."""

    def find(results: Results) -> Figure | None:
        found = results.latency(f"round {kind}, batch {batch}")
        peer = results.vllm(config, batch)
        if found is None or peer is None:
            return None
        ours = float(found[1]["tok_s"] if metric == "tok_s" else found[1]["value"])
        theirs = float(peer[metric])
        unit = "tok/s" if metric == "tok_s" else "ms"
        figure = _figure(found)
        text = f"{ours / theirs:.3f} × ({_number(ours)} {unit})"
        return Figure(ours / theirs, text, figure.source, figure.floor, figure.ratio, f"vLLM {_number(theirs)} {unit}")

    return find


def _transports(transport: str, **settings: Any) -> Callable[[Results], Figure | None]:
    """A round through a transport over one in process."""

    def find(results: Results) -> Figure | None:
        case = "round tree 5/8/32, batch 1"
        found = results.latency(case, transport=transport, **settings)
        inproc = results.latency(case)
        if found is None or inproc is None:
            return None
        ratio = found[1]["value"] / inproc[1]["value"]
        return Figure(
            ratio, f"{ratio:.3f} × ({_number(found[1]['value'])} ms)", found[0].path, f"{_number(inproc[1]['value'])} ms in process"
        )

    return find


def _share(case: str, name: str) -> Callable[[Results], Figure | None]:
    """A share that a latency row carries, as a percentage."""

    def find(results: Results) -> Figure | None:
        found = results.latency(case, needs=name)
        if found is None:
            return None
        share = 100 * float(found[1][name])
        figure = _figure(found)
        return Figure(share, f"{share:.1f} % ({figure.text})", figure.source, figure.floor, figure.ratio)

    return find


def _demo_pair(results: Results) -> Figure | None:
    found = results.summary("speculation-cuda.json")
    if found is None:
        return None
    ratio = float(found[1]["on_over_off"]["median"])
    return Figure(ratio, f"{ratio:.2f} ×", found[0].path)


GOALS: Sequence[Goal] = (
    Goal("plain decode, batch 1, a step", 4.1, "≤ 4.1 ms", _plain("plain, batch 1"), peer="SGLang 4.78, vLLM 4.86 ms"),
    Goal("the same with `--tp 2`", 2.8, "≤ 2.8 ms", _plain("plain, batch 1", tp=2)),
    Goal("verify 32 nodes, batch 1 (forward, GPU alone)", 4.5, "≤ 4.5 ms", _kernel("forward 32 rows, batch 1, context 768")),
    Goal("verify 64 nodes, batch 1 (forward, GPU alone)", 4.7, "≤ 4.7 ms", _kernel("forward 64 rows, batch 1, context 768")),
    Goal("EAGLE-3 propose, 5 steps, topk 8, extend included", 1.3, "≤ 1.3 ms", _kernel("propose 5/8/32, batch 1")),
    Goal("round, tree 5/8/32, batch 1", 6.0, "≤ 6.0 ms", _round("tree 5/8/32, batch 1"), peer="SGLang 9.7 ms"),
    Goal("round, chain of 5, batch 1", 5.5, "≤ 5.5 ms", _round("chain 5, batch 1"), peer="vLLM 6.44, SGLang 8.9 ms"),
    Goal("round, chain of 3, batch 1", 5.0, "≤ 5.0 ms", _round("chain 3, batch 1"), peer="vLLM 5.85 ms"),
    *(
        Goal(
            f"round, chain of {steps}, batch {batch} ÷ vLLM's",
            0.88,
            "≤ 0.88 ×",
            _against_vllm(f"chain {steps}", batch, f"chain{steps}", "ms_round"),
        )
        for steps in (3, 5)
        for batch in (4, 16)
    ),
    Goal("round, tree 5/8/32, batch 4", 7.2, "≤ 7.2 ms", _round("tree 5/8/32, batch 4"), peer="SGLang 11.5 ms"),
    Goal("round, tree 5/8/32, batch 16", 15.6, "≤ 15.6 ms", _round("tree 5/8/32, batch 16"), peer="SGLang 20.8 ms"),
    Goal(
        "chain of 3, batch 64, tokens/s ÷ vLLM's",
        1.06,
        "≥ 1.06 ×",
        _against_vllm("chain 3", 64, "chain3", "tok_s"),
        True,
        "vLLM 14,190 tok/s",
    ),
    Goal("`ipc:` ÷ in process, one GPU", 1.08, "≤ 1.08 ×", _transports("ipc")),
    Goal("`ipc:` ÷ in process, draft on a second GPU", 1.02, "≤ 1.02 ×", _transports("ipc", draft_device="cuda:1")),
    Goal("`grpc:` on loopback ÷ in process", 1.10, "≤ 1.10 ×", _transports("grpc")),
    Goal("GPU idle between rounds, tree 5/8/32, batch 1", 3.0, "≤ 3 %", _share("round tree 5/8/32, batch 1", "gpu_idle_between")),
    Goal(
        "plain decode, batch 64, tokens/s ÷ vLLM's",
        1.03,
        "≥ 1.03 ×",
        _against_vllm("plain", 64, "plain", "tok_s"),
        True,
        "vLLM 9,399 tok/s",
    ),
    Goal("prefill of 2048 tokens, of the matrix rate", 60.0, "≥ 60 %", _share("prefill 2048", "share_of_matrix_rate"), True),
    Goal("demo pair, real acceptance, on ÷ off", 2.0, "≥ 2 ×", _demo_pair, True),
)


def run_table(results: Path, document: Path | None, check: bool) -> int:
    """Print the table, or write it into a document; see `outrider bench table`.

    Raises:
        ConfigurationError: The document has no place for it, or a result cannot be read.
    """
    made = "\n".join(table_lines(Results(results), results))
    if document is None:
        print(made)
        return 0
    text = document.read_text(encoding="utf-8")
    if BEGIN not in text or END not in text:
        raise ConfigurationError(f"{document} has no place for the table: it needs the lines\n{BEGIN}\n{END}", field="--document")
    before, rest = text.split(BEGIN, 1)
    new = f"{before}{BEGIN}\n\n{made}\n\n{END}{rest.split(END, 1)[1]}"
    if check:
        if new != text:
            print(f"{document} differs from the recorded results; run `outrider bench table --document {document}`.", file=sys.stderr)
        return int(new != text)
    document.write_text(new, encoding="utf-8")
    return 0


def table_lines(results: Results, folder: Path) -> Iterator[str]:
    """Yield the lines of the table, then the command of every file that it names."""
    yield "| | goal | ours | floor | × floor | peer | result |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    sources: dict[Path, None] = {}
    for goal in GOALS:
        figure = goal.find(results)
        if figure is None:
            yield f"| {goal.what} | {goal.text} | {NOT_MEASURED} | | | {goal.peer} | |"
            continue
        sources[figure.source] = None
        mark = "" if goal.met(figure) else " (missed)"
        cells = (goal.what, goal.text, f"**{figure.text}**{mark}", figure.floor, figure.ratio, figure.peer or goal.peer, figure.source.stem)
        yield "| " + " | ".join(cells) + " |"
    if sources:
        yield ""
        yield "Commands:"
        for path in sorted(sources):
            command = " ".join(str(part) for part in _read(path).get("command", ()))
            yield f"- [{path.stem}](../bench/results/{path.name}): `{command}`"


def _figure(found: tuple[Recorded, Mapping[str, Any]], peer: str = "") -> Figure:
    recorded, row = found
    floor = "" if row.get("floor") is None else f"{_number(row['floor'])} {row['unit']} ({row.get('floor_of', '')})"
    ratio = "" if row.get("ratio") is None else f"{row['ratio']:.2f}"
    return Figure(float(row["value"]), f"{_number(row['value'])} {row['unit']}", recorded.path, floor, ratio, peer)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 100 else f"{value:.2f}"


def _read(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigurationError(f"{path} is not JSON: {error}.", field="--results") from None
    return content if isinstance(content, dict) else {}


def _read_lines(path: Path) -> list[Mapping[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("{")]
