"""The pictures of `outrider tune`."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from outrider.bench.plot.canvas import DARK, LIGHT
from outrider.services.tune.plot import picture, write_pictures
from outrider.services.tune.result import BatchResult, TuneResult
from outrider.shared.base.errors import ConfigurationError
from outrider.shared.spec.tree import NO_DRAFT, DraftShape

CHAIN, TREE, DEEP = DraftShape(3, 1, 4), DraftShape(5, 4, 16), DraftShape(8, 8, 64)
SVG = "{http://www.w3.org/2000/svg}"
RESULT = TuneResult(
    {CHAIN: 2.0, TREE: 3.0, DEEP: 3.5},
    [
        BatchResult(1, {CHAIN: 1.6, TREE: 2.2, DEEP: 1.9}, {NO_DRAFT: 100.0, CHAIN: 150.0, TREE: 231.0}),
        BatchResult(4, {CHAIN: 1.2, TREE: 0.8, DEEP: 0.4}, {NO_DRAFT: 300.0, CHAIN: 390.0}),
    ],
)


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_each_shape_has_a_bar_for_each_number_of_requests(theme) -> None:  # type: ignore[no-untyped-def]
    root = ElementTree.fromstring(picture(RESULT, "target", "head", theme))
    texts = [node.text or "" for node in root.iter(f"{SVG}text")]
    assert {"plain", "chain 3", "tree 5/4/16", "tree 8/8/64", "1 at a time", "4 at a time"} <= set(texts)
    assert {"1.50", "2.31", "1.30", "1.90", "0.80", "0.40"} <= set(texts)
    assert "outrider tune: target, head" in texts
    outlined = [node for node in root.iter(f"{SVG}rect") if node.get("fill") == theme.ground]
    assert len(outlined) == 1 + 3, "the background, and the three estimates"
    assert "2.31 for 1 at a time" in (root.findtext(f"{SVG}desc") or "")
    height = float(root.attrib["height"])
    assert all(float(node.attrib["y"]) < height for node in root.iter(f"{SVG}text"))


def test_the_theme_is_added_to_the_name(tmp_path: Path) -> None:
    written = write_pictures(tmp_path / "speed.svg", RESULT, "target", "head")
    assert [path.name for path in written] == ["speed-light.svg", "speed-dark.svg"]
    assert all(path.read_text().startswith("<svg") for path in written)
    with pytest.raises(ConfigurationError, match=r"--plot .*missing"):
        write_pictures(tmp_path / "missing" / "speed.svg", RESULT, "target", "head")
