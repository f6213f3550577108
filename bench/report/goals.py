"""Defines the goals table in docs/performance.md: each row's goal, its limit and the recorded figure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from outrider.bench.report.recorded import PeerFigures, RecordedResult, Results


@dataclass(frozen=True, slots=True)
class GoalFigure:
    """The measured figure that is compared with a goal.

    Attributes:
        value: The figure, in the unit of the goal.
        text: The figure, as the table shows it.
        source: File that contains the result.
        floor, ratio: Best possible value (the floor) of the figure's row in the result file, and `value`
            divided by this floor. Both are texts for the table, and are empty if the row has no floor.
        peer: The recorded figure of another server (a peer), as the table shows it. Empty if there is no such
            figure.
        peer_source: File that contains the figure of the peer.
    """

    value: float
    text: str
    source: Path
    floor: str = ""
    ratio: str = ""
    peer: str = ""
    peer_source: PeerFigures | None = None


@dataclass(frozen=True, slots=True)
class Goal:
    """A row of the goals table in the performance documentation.

    Attributes:
        what: Name of the measurement in the table.
        limit: Largest value that meets the goal, or smallest such value if `at_least` is True. None if no
            limit was set; the row is then left out of the table until a figure exists.
        text: The limit, as the table shows it.
        find: Function that returns the figure from the recorded results, or None if they do not contain it.
        at_least: True if `limit` is a lower bound.
        peer: Figure of another server (a peer) that is not in the recorded results, and its source, as the
            table shows them.
    """

    what: str
    limit: float | None
    text: str
    find: Callable[[Results], GoalFigure | None]
    at_least: bool = False
    peer: str = ""

    def met(self, figure: GoalFigure) -> bool:
        """Return whether the figure meets the limit; True if there is no limit."""
        if self.limit is None:
            return True
        return figure.value >= self.limit if self.at_least else figure.value <= self.limit


def _round(
    kind: str, batch: int, config: str = "", **settings: Any
) -> Callable[[Results], GoalFigure | None]:
    """Return a function that finds a round's milliseconds and, for `config`, the figure of vLLM.

    If Outrider was measured in the same session as vLLM, Outrider's result of that session is used. If
    `settings` contain `tp`, the session is ignored, because vLLM always ran on one GPU.
    """

    def find(results: Results) -> GoalFigure | None:
        peer = results.vllm(config, batch)
        session = peer[0] if peer is not None and "tp" not in settings else None
        found = results.latency(f"round {kind}, batch {batch}", beside=session, **settings)
        if found is None:
            return None
        if peer is None:
            return _figure(found)
        who = "vLLM (one GPU)" if "tp" in settings else "vLLM"
        return replace(_figure(found), peer=f"{who} {peer[1]['ms_round']:.2f} ms", peer_source=peer[0])

    return find


def _sglang(milliseconds: float) -> str:
    """Return SGLang's figure for a round. The figure was given with the goals and is in no result file."""
    return f"SGLang {milliseconds:g} ms (no result file)"


def _kernel(case: str) -> Callable[[Results], GoalFigure | None]:
    """Return a function that finds the time of a kernel case, in milliseconds."""

    def find(results: Results) -> GoalFigure | None:
        found = results.kernels(case)
        if found is None:
            return None
        row = dict(found[1])
        if row["unit"] == "us":
            row |= {
                "unit": "ms",
                "value": row["value"] / 1e3,
                "floor": None if row["floor"] is None else row["floor"] / 1e3,
            }
        return _figure((found[0], row))

    return find


def _against_vllm(kind: str, batch: int, config: str, metric: str) -> Callable[[Results], GoalFigure | None]:
    """Return a function that finds the ratio of Outrider's figure to vLLM's figure for the same round."""

    def find(results: Results) -> GoalFigure | None:
        peer = results.vllm(config, batch)
        found = results.latency(f"round {kind}, batch {batch}", beside=peer and peer[0])
        if found is None or peer is None:
            return None
        ours = float(found[1]["tok_s"] if metric == "tok_s" else found[1]["value"])
        theirs = float(peer[1][metric])
        unit = "tok/s" if metric == "tok_s" else "ms"
        figure = _figure(found)
        text = f"{ours / theirs:.3f} × ({_number(ours)} {unit})"
        return replace(
            figure, value=ours / theirs, text=text, peer=f"vLLM {_number(theirs)} {unit}", peer_source=peer[0]
        )

    return find


def _transports(transport: str, **settings: Any) -> Callable[[Results], GoalFigure | None]:
    """Return a function that divides a round's time over `transport` by that of the nearest in-process run.

    `RecordedResult.distance` defines which run is nearest.
    """

    def find(results: Results) -> GoalFigure | None:
        case = "round tree 5/8/32, batch 1"
        found = results.latency(case, transport=transport, **settings)
        inproc = found and results.latency(case, near=found[0])
        if found is None or inproc is None:
            return None
        ratio = found[1]["value"] / inproc[1]["value"]
        text = f"{ratio:.3f} × ({_number(found[1]['value'])} ms)"
        return GoalFigure(
            ratio, text, found[0].path, f"{_number(inproc[1]['value'])} ms in-process", f"{ratio:.3f}"
        )

    return find


def _over_wide(case: str, **changes: Any) -> Callable[[Results], GoalFigure | None]:
    """Return a function that divides a round with `changes` by the same round of the nearest default run."""

    def find(results: Results) -> GoalFigure | None:
        found = results.latency(case, changes=changes)
        wide = found and results.latency(case, near=found[0])
        if found is None or wide is None:
            return None
        ratio = found[1]["value"] / wide[1]["value"]
        figure = _figure(found)
        text = f"{ratio:.3f} × ({figure.text} vs. {_number(wide[1]['value'])} ms)"
        return GoalFigure(ratio, text, figure.source, figure.floor, figure.ratio)

    return find


def _perplexity(case: str) -> Callable[[Results], GoalFigure | None]:
    """Return a function that finds the increase of perplexity, in percent."""

    def find(results: Results) -> GoalFigure | None:
        found = results.perplexity(case)
        if found is None:
            return None
        increase = float(found[1]["increase_percent"])
        wide = found[0].row("as it is")
        before = "" if wide is None else f"{_number(wide['value'])} unquantized"
        where = f"{found[0].settings('device')}, {found[0].settings('dtype')}"
        text = f"{increase:+.2f} % ({_number(found[1]['value'])}; {where})"
        return GoalFigure(increase, text, found[0].path, before, f"{1 + increase / 100:.3f}")

    return find


def _share(case: str, name: str, whole: str = "", what: str = "") -> Callable[[Results], GoalFigure | None]:
    """Return a function that finds a share recorded in a latency row, and converts it to percent.

    If the share is part of a larger share, `whole` is the name of the larger share, and `what` describes the
    part.
    """

    def find(results: Results) -> GoalFigure | None:
        found = results.latency(case, needs=name)
        if found is None:
            return None
        share = 100 * float(found[1][name])
        figure = _figure(found)
        more = f" {what}, {100 * float(found[1][whole]):.1f} % in total" if whole in found[1] else ""
        return GoalFigure(
            share, f"{share:.1f} %{more} ({figure.text})", figure.source, figure.floor, figure.ratio
        )

    return find


def _demo_pair(results: Results) -> GoalFigure | None:
    """Find the demo pair's speedup at batch 1: tokens per second of `auto` relative to `off`."""
    found = results.summary("speculation-cuda.json")
    if found is None:
        return None
    summary, *others = found[0].content["summary"]
    ratio, most = float(summary["auto_over_off"]["median"]), float(summary["accept_length"]["auto"])
    also = [f"{other['auto_over_off']['median']:.2f} × at T = {other['temperature']:g}" for other in others]
    also.append(f"{summary['on_over_off']['median']:.2f} × with `on`, the same tree in every round")
    text = f"{ratio:.2f} × ({'; '.join(also)})"
    return GoalFigure(
        ratio,
        text,
        found[0].path,
        f"{most:.2f} × (the accept length)",
        f"{most / ratio:.2f}",
    )


def _figure(found: tuple[RecordedResult, Mapping[str, Any]]) -> GoalFigure:
    recorded, row = found
    floor = (
        ""
        if row.get("floor") is None
        else f"{_number(row['floor'])} {row['unit']} ({row.get('floor_of', '')})"
    )
    ratio = "" if row.get("ratio") is None else f"{row['ratio']:.2f}"
    return GoalFigure(
        float(row["value"]), f"{_number(row['value'])} {row['unit']}", recorded.path, floor, ratio
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 100 else f"{value:.2f}"


GOALS: Sequence[Goal] = (
    Goal("plain decode step, batch 1", 4.1, "≤ 4.1 ms", _round("plain", 1, "plain"), peer=_sglang(4.78)),
    Goal("plain decode step, batch 1, `--tp 2`", 2.8, "≤ 2.8 ms", _round("plain", 1, "plain", tp=2)),
    Goal("plain decode step, batch 1, `--tp 4`", None, "", _round("plain", 1, "plain", tp=4)),
    Goal(
        "verify pass, 32 nodes, batch 1 (GPU time only)",
        4.5,
        "≤ 4.5 ms",
        _kernel("forward 32 rows, batch 1, context 768"),
    ),
    Goal(
        "verify pass, 64 nodes, batch 1 (GPU time only)",
        4.7,
        "≤ 4.7 ms",
        _kernel("forward 64 rows, batch 1, context 768"),
    ),
    Goal(
        "drafting one tree 5/8/32 with EAGLE-3, batch 1 (GPU time only)",
        1.3,
        "≤ 1.3 ms",
        _kernel("propose 5/8/32, batch 1"),
    ),
    Goal("round, tree 5/8/32, batch 1", 6.0, "≤ 6.0 ms", _round("tree 5/8/32", 1), peer=_sglang(9.7)),
    Goal("round, chain of 5, batch 1", 5.5, "≤ 5.5 ms", _round("chain 5", 1, "chain5"), peer=_sglang(8.9)),
    Goal("round, chain of 3, batch 1", 5.0, "≤ 5.0 ms", _round("chain 3", 1, "chain3")),
    *(
        Goal(
            f"round, chain of {steps}, batch {batch}, relative to vLLM",
            0.88,
            "≤ 0.88 ×",
            _against_vllm(f"chain {steps}", batch, f"chain{steps}", "ms_round"),
        )
        for steps in (3, 5)
        for batch in (4, 16)
    ),
    Goal("round, tree 5/8/32, batch 4", 7.2, "≤ 7.2 ms", _round("tree 5/8/32", 4), peer=_sglang(11.5)),
    Goal("round, tree 5/8/32, batch 16", 15.6, "≤ 15.6 ms", _round("tree 5/8/32", 16), peer=_sglang(20.8)),
    Goal(
        "chain of 3, batch 64, tokens/s relative to vLLM",
        1.06,
        "≥ 1.06 ×",
        _against_vllm("chain 3", 64, "chain3", "tok_s"),
        True,
    ),
    Goal("round over `ipc:` relative to in-process, one GPU", 1.08, "≤ 1.08 ×", _transports("ipc")),
    Goal(
        "round over `ipc:` relative to in-process, one GPU with MPS",
        1.03,
        "≤ 1.03 ×",
        _transports("ipc", mps=True),
    ),
    Goal(
        "round over `ipc:` relative to in-process, draft on a second GPU",
        1.02,
        "≤ 1.02 ×",
        _transports("ipc", draft_device="cuda:1"),
    ),
    Goal("round over loopback `grpc:` relative to in-process", 1.10, "≤ 1.10 ×", _transports("grpc")),
    Goal(
        "GPU idle between rounds, tree 5/8/32, batch 1",
        3.0,
        "≤ 3 %",
        _share("round tree 5/8/32, batch 1", "gpu_idle_between", "gpu_idle", "in gaps over 8 µs"),
    ),
    Goal(
        "plain decode, batch 64, tokens/s relative to vLLM",
        1.03,
        "≥ 1.03 ×",
        _against_vllm("plain", 64, "plain", "tok_s"),
        True,
    ),
    Goal(
        "prefill of 2048 tokens, share of the matrix rate",
        60.0,
        "≥ 60 %",
        _share("prefill 2048", "share_of_matrix_rate"),
        True,
    ),
    Goal(
        "plain decode step, batch 1, FP8 products relative to bf16",
        0.65,
        "≤ 0.65 ×",
        _over_wide("round plain, batch 1", quantization="fp8"),
    ),
    Goal(
        "perplexity with FP8 products, demo target, GSM8K test text",
        1.0,
        "≤ +1 %",
        _perplexity("FP8 products"),
    ),
    Goal("perplexity with an FP8 KV cache, same model and text", None, "", _perplexity("FP8 cache")),
    Goal(
        "demo pair, real acceptance: tokens/s of `auto` (the default) relative to `off`",
        2.0,
        "≥ 2 ×",
        _demo_pair,
        True,
    ),
)
