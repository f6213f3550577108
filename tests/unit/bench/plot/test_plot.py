"""The pictures of recorded results: they are current, well formed, and show the recorded figures."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from outrider.bench.plot.canvas import DARK, LIGHT, Theme
from outrider.bench.plot.charts import Axis
from outrider.bench.plot.pictures import MIXED, PICTURES, ROUND, round_tree_picture
from outrider.services.cli import commands as cli
from outrider.shared.base.errors import ConfigurationError

ROOT = Path(__file__).resolve().parents[4]
RESULTS = ROOT / "bench" / "results"
SVG = "{http://www.w3.org/2000/svg}"
RUNNER = CliRunner()


def texts(picture: str) -> list[str]:
    return [node.text or "" for node in ElementTree.fromstring(picture).iter(f"{SVG}text")]


def luminance(colour: str) -> float:
    """Return the relative luminance of ``#rrggbb``, as WCAG defines it."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_the_committed_pictures_are_current() -> None:
    arguments = ["bench", "plot", "--check", "--results", str(RESULTS), "--output", str(ROOT / "docs/images")]
    result = RUNNER.invoke(cli.app, arguments)
    assert result.exit_code == 0, f"{result.output}: run make pictures"


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_well_formed_and_says_what_it_shows(name: str, theme: Theme) -> None:
    picture = PICTURES[name](RESULTS, theme)
    root = ElementTree.fromstring(picture)
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    assert root.attrib["role"] == "img"
    assert len(root.findtext(f"{SVG}desc") or "") > 40
    assert theme.ground in picture
    assert "script" not in picture
    assert "http" not in picture.replace("http://www.w3.org/2000/svg", ""), "nothing is loaded"
    for node in root.iter(f"{SVG}text"):
        size, x = float(node.attrib["font-size"]), float(node.attrib["x"])
        # A generous estimate of the width of a character.
        long = 0.62 * size * len(node.text or "")
        left = {"start": x, "middle": x - long / 2, "end": x - long}[node.attrib["text-anchor"]]
        if "transform" not in node.attrib:
            assert left >= 0, node.text
            assert left + long <= width, node.text
        assert 0 < float(node.attrib["y"]) < height


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_text_and_data_stand_out(theme: Theme) -> None:
    for colour, least in ((theme.ink, 7.0), (theme.muted, 4.5), *((one, 4.5) for one in theme.series)):
        bright, dim = sorted((luminance(colour), luminance(theme.ground)), reverse=True)
        assert (bright + 0.05) / (dim + 0.05) >= least, colour


def test_the_tree_shows_the_accepted_path_and_the_targets_own_token() -> None:
    one = json.loads((RESULTS / ROUND).read_text())["round"]
    shown = texts(round_tree_picture(RESULTS, LIGHT))
    assert [text.replace(" ", "·") for text in one["emitted_text"]] == [
        text for text in shown if text.replace("·", " ") in one["emitted_text"]
    ][-len(one["emitted_text"]) :]
    picture = ElementTree.fromstring(round_tree_picture(RESULTS, LIGHT))
    filled = [node for node in picture.iter(f"{SVG}rect") if node.attrib["fill"] == LIGHT.series[0]]
    assert len(filled) == len(one["accepted"]) + 1, "the root too"
    boxes = [node for node in picture.iter(f"{SVG}rect") if "stroke" in node.attrib]
    assert len(boxes) == len(one["nodes"])
    assert len({(node.attrib["x"], node.attrib["y"]) for node in boxes}) == len(boxes), (
        "no box covers another"
    )


def test_bars_have_the_ratios_of_the_newest_run_of_each_case() -> None:
    rows = [row for name in MIXED for row in json.loads((RESULTS / name).read_text())["rows"]]
    newest = {row["name"]: row["ratio"] for row in rows}
    assert len(newest) < len(rows), "some cases were measured several times"
    shown = texts(PICTURES["mixed-load"](RESULTS, LIGHT))
    for name, ratio in newest.items():
        assert shown.count(name) == 1
        assert shown[shown.index(name) + 1] == f"{ratio:.2f}"


def test_axes_place_values() -> None:
    assert Axis("x", (0, 1, 2)).place(1) == 0.5
    assert Axis("x", (1, 4, 16), logarithmic=True).place(4) == pytest.approx(0.5)


def test_wrong_names_and_missing_results_are_named(tmp_path: Path) -> None:
    result = RUNNER.invoke(cli.app, ["bench", "plot", "--only", "nothing"])
    assert isinstance(result.exception, ConfigurationError)
    assert "--only nothing: there is no such picture. Known: round-tree, " in str(result.exception)
    result = RUNNER.invoke(cli.app, ["bench", "plot", "--results", str(tmp_path), "--output", str(tmp_path)])
    assert "cannot read round_demo_cpu.json" in str(result.exception)


def test_a_stale_picture_is_found(tmp_path: Path) -> None:
    options = ["--results", str(RESULTS), "--output", str(tmp_path), "--only", "mixed-load"]
    assert RUNNER.invoke(cli.app, ["bench", "plot", *options]).exit_code == 0
    assert RUNNER.invoke(cli.app, ["bench", "plot", "--check", *options]).exit_code == 0
    (tmp_path / "mixed-load-dark.svg").write_text("old")
    assert RUNNER.invoke(cli.app, ["bench", "plot", "--check", *options]).exit_code == 1


def test_pictures_go_to_the_current_folder_and_are_overwritten_only_by_force(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["bench", "plot", "--results", str(RESULTS), "--only", "mixed-load"]
    assert RUNNER.invoke(cli.app, arguments).exit_code == 0
    assert {file.name for file in tmp_path.iterdir()} == {"mixed-load-light.svg", "mixed-load-dark.svg"}
    (tmp_path / "mixed-load-light.svg").write_text("mine")
    again = RUNNER.invoke(cli.app, arguments)
    assert isinstance(again.exception, ConfigurationError)
    assert "mixed-load-light.svg exists" in str(again.exception)
    assert (tmp_path / "mixed-load-light.svg").read_text() == "mine"
    assert RUNNER.invoke(cli.app, [*arguments, "--force"]).exit_code == 0
    assert (tmp_path / "mixed-load-light.svg").read_text().startswith("<svg")
