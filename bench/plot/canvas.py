"""Writes SVG: colours of the two themes, and the few shapes that the pictures need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

FONT = "Helvetica, Arial, 'Liberation Sans', sans-serif"
MONO = "'DejaVu Sans Mono', Menlo, Consolas, monospace"


@dataclass(frozen=True, slots=True)
class Theme:
    """Colours of a picture.

    Attributes:
        name: Name of the theme, ``light`` or ``dark``.
        ground, ink, muted, grid: Colours of the background, of text, of secondary text, and of grid lines.
        series: Colours of the data. They also differ in brightness, for readers who cannot distinguish all
            colours.
    """

    name: str
    ground: str
    ink: str
    muted: str
    grid: str
    series: tuple[str, ...]


LIGHT = Theme(
    "light", "#ffffff", "#1f2328", "#57606a", "#d0d7de", ("#0072b2", "#b34700", "#00794f", "#8e3a76")
)
DARK = Theme("dark", "#0d1117", "#e6edf3", "#9198a1", "#30363d", ("#56b4e9", "#e69f00", "#3fc796", "#e39cc4"))


class Canvas:
    """An SVG picture under construction. Coordinates are in pixels from the upper left corner.

    Args:
        width, height: Size of the picture.
        theme: The colours.
        title: Name of the picture, for screen readers.
        description: Description of the content, for screen readers.
    """

    def __init__(self, width: float, height: float, theme: Theme, title: str, description: str) -> None:
        self.theme = theme
        self._head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_n(width)} {_n(height)}" '
            f'width="{_n(width)}" height="{_n(height)}" role="img" aria-labelledby="title desc" '
            f'font-family="{FONT}">\n<title id="title">{escape(title)}</title>\n'
            f'<desc id="desc">{escape(description)}</desc>\n'
            f'<rect width="{_n(width)}" height="{_n(height)}" rx="8" fill="{theme.ground}"/>\n'
        )
        self._parts: list[str] = []

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float = 13,
        colour: str = "",
        anchor: str = "start",
        bold: bool = False,
        mono: bool = False,
        turned: bool = False,
    ) -> None:
        """Write text with its baseline at `y`. `anchor` is start, middle or end."""
        extra = f' font-family="{MONO}"' if mono else ""
        extra += ' font-weight="600"' if bold else ""
        extra += f' transform="rotate(-90 {_n(x)} {_n(y)})"' if turned else ""
        self._parts.append(
            f'<text x="{_n(x)}" y="{_n(y)}" font-size="{_n(size)}" fill="{colour or self.theme.ink}" '
            f'text-anchor="{anchor}"{extra} xml:space="preserve">{escape(text)}</text>\n'
        )

    def line(
        self, points: Sequence[tuple[float, float]], colour: str, width: float = 1, dashes: str = ""
    ) -> None:
        """Draw a line through points."""
        path = " ".join(f"{_n(x)},{_n(y)}" for x, y in points)
        extra = f' stroke-dasharray="{dashes}"' if dashes else ""
        self._parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{_n(width)}" '
            f'stroke-linejoin="round"{extra}/>\n'
        )

    def curve(self, start: tuple[float, float], end: tuple[float, float], colour: str, width: float) -> None:
        """Draw a curve that leaves and arrives horizontally."""
        middle = (start[0] + end[0]) / 2
        self._parts.append(
            f'<path d="M{_n(start[0])} {_n(start[1])} C{_n(middle)} {_n(start[1])} {_n(middle)} {_n(end[1])} '
            f'{_n(end[0])} {_n(end[1])}" fill="none" stroke="{colour}" stroke-width="{_n(width)}"/>\n'
        )

    def dot(self, x: float, y: float, radius: float, colour: str) -> None:
        """Draw a dot."""
        self._parts.append(f'<circle cx="{_n(x)}" cy="{_n(y)}" r="{_n(radius)}" fill="{colour}"/>\n')

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        *,
        fill: str,
        stroke: str = "",
        radius: float = 0,
    ) -> None:
        """Draw a box."""
        extra = f' stroke="{stroke}"' if stroke else ""
        extra += f' rx="{_n(radius)}"' if radius else ""
        self._parts.append(
            f'<rect x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}" fill="{fill}"'
            f"{extra}/>\n"
        )

    def render(self) -> str:
        """Return the SVG text."""
        return self._head + "".join(self._parts) + "</svg>\n"


def _n(value: float) -> str:
    return f"{value:.1f}".rstrip("0").rstrip(".")
