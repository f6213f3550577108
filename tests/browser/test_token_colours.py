"""Every depth of a drafted token has its own colour, on which the text stays readable."""

from __future__ import annotations

from itertools import combinations, pairwise
from math import dist

import pytest
from page_steps import OpenPage
from playwright.sync_api import expect

DEPTHS = 16
READ_COLOURS = """() => {
    const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
    const below = getComputedStyle(document.getElementById('log')).backgroundColor;
    const drawn = (...colours) => {
        for (const colour of colours) { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); }
        return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3).map((one) => one / 255);
    };
    const style = (one) => getComputedStyle(one);
    const tokens = [...document.querySelectorAll('.legend .token.draft, .legend .token.bonus')];
    return tokens.map((one) => [drawn(below, style(one).backgroundColor), drawn(style(one).color)]);
}"""

Colour = tuple[float, float, float]


def linear(colour: Colour) -> list[float]:
    return [one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in colour]


def contrast(one: Colour, other: Colour) -> float:
    """Return the contrast ratio of WCAG 2."""
    dark, light = sorted(
        sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear(part), strict=True))
        for part in (one, other)
    )
    return (light + 0.05) / (dark + 0.05)


def oklab(colour: Colour) -> list[float]:
    """Return a colour in Oklab, in which distances are about as large as they look."""
    red, green, blue = linear(colour)
    long = (0.4122214708 * red + 0.5363325363 * green + 0.0514459929 * blue) ** (1 / 3)
    middle = (0.2119034982 * red + 0.6806995451 * green + 0.1073969566 * blue) ** (1 / 3)
    short = (0.0883024619 * red + 0.2817188376 * green + 0.6299787005 * blue) ** (1 / 3)
    return [
        0.2104542553 * long + 0.7936177850 * middle - 0.0040720468 * short,
        1.9779984951 * long - 2.4285922050 * middle + 0.4505937099 * short,
        0.0259040371 * long + 0.7827717662 * middle - 0.8086757660 * short,
    ]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_sixteen_depths_have_readable_and_different_colours(open_page: OpenPage, scheme: str) -> None:
    page = open_page(color_scheme=scheme)
    expect(page.locator(".legend .token.draft")).to_have_count(DEPTHS)
    colours = page.evaluate(READ_COLOURS)
    assert len(colours) == DEPTHS + 1
    assert min(contrast(back, ink) for back, ink in colours) >= 4.5
    seen = [oklab(back) for back, _ in colours]
    # The smallest distance that can be seen is about 0.02.
    assert min(dist(one, other) for one, other in pairwise(seen[:DEPTHS])) > 0.04
    assert min(dist(one, other) for one, other in combinations(seen, 2)) > 0.015
