"""The colours: the same in figures and style sheet, readable in both modes, apart for the colour-blind."""

from __future__ import annotations

import itertools
import re

import plotly.graph_objects as go
import pytest
from conftest import ROOT

from kvlab.show import theme

CSS = (ROOT / "book" / "assets" / "css" / "shared-state.css").read_text("utf8")
# Machado, Oliveira and Fernandes 2009, severity 1.0, on linear RGB
VISION = {
    "full": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
}


def variables(mode: str | None = None) -> dict[str, str]:
    """Return the --kv variables of the style sheet: those of both modes, or of one."""
    head = r":root" if mode is None else rf'html\[data-theme="{mode}"\]'
    block = re.search(head + r" \{(.*?)\n\}", CSS, re.DOTALL)[1]
    return dict(re.findall(r"--kv-([a-z-]+): (.+?);", block))


def linear(colour: str) -> list[float]:
    """Return a #rrggbb colour as linear RGB, 0 to 1."""
    parts = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]


def contrast(a: str, b: str) -> float:
    """Return the contrast ratio of WCAG 2, 1 to 21."""
    light, dark = sorted(sum(x * w for x, w in zip(linear(c), (0.2126, 0.7152, 0.0722), strict=True)) for c in (a, b))[::-1]
    return (light + 0.05) / (dark + 0.05)


def oklab(rgb: list[float]) -> list[float]:
    """Return linear RGB as Oklab (Ottosson 2020), times 100."""
    r, g, b = (min(max(c, 0), 1) for c in rgb)
    lms = [
        (0.4122214708 * r + 0.5363325363 * g + 0.0514459929 * b) ** (1 / 3),
        (0.2119034982 * r + 0.6806995451 * g + 0.1073969566 * b) ** (1 / 3),
        (0.0883024619 * r + 0.2817188376 * g + 0.6299787005 * b) ** (1 / 3),
    ]
    rows = [
        (0.2104542553, 0.7936177850, -0.0040720468),
        (1.9779984951, -2.4285922050, 0.4505937099),
        (0.0259040371, 0.7827717662, -0.8086757660),
    ]
    return [100 * sum(w * c for w, c in zip(row, lms, strict=True)) for row in rows]


def apart(a: str, b: str) -> float:
    """Return the smallest distance of two colours over the kinds of vision; about 2 is just noticeable side by side."""
    seen = []
    for matrix in VISION.values():
        x, y = (oklab([sum(w * c for w, c in zip(row, linear(colour), strict=True)) for row in matrix]) for colour in (a, b))
        seen.append(sum((p - q) ** 2 for p, q in zip(x, y, strict=True)) ** 0.5)
    return min(seen)


def test_style_sheet_has_the_figures_colours() -> None:
    """One colour means one thing, in a figure and in the page."""
    css = variables()
    ours = {f"owner-{name.lower()}": colour for name, colour in theme.OWNERS.items()}
    ours |= {name: getattr(theme, name.upper()) for name in ("shared", "pad", "free", "healthy", "sick")}
    assert {name: css[name] for name in ours} == ours
    light = variables("light")
    assert [light[name] for name in ("ink", "muted", "grid", "paper")] == [theme.INK, theme.MUTED, theme.GRID, theme.PAPER]
    assert theme.FONT.split(",")[0] == css["sans"].split(",")[0]


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_contrast(mode: str) -> None:
    """Marks have 3:1 with the page, text 4.5:1 with the page and with a card (WCAG 2.2, 1.4.11 and 1.4.3)."""
    page = variables(mode)
    for colour in [*theme.OWNERS.values(), theme.SHARED, theme.HEALTHY, theme.SICK, theme.PAD]:
        assert contrast(colour, page["paper"]) >= 3, colour
    for text, ground in itertools.product(("ink", "muted", "accent", "sick-ink"), ("paper", "card")):
        assert contrast(page[text], page[ground]) >= 4.5, (text, ground)


def test_apart_for_the_colour_blind() -> None:
    """The first four owners and the shared prefix stay apart pairwise, and so do healthy and sick."""
    pairs = list(itertools.combinations([*list(theme.OWNERS.values())[:4], theme.SHARED], 2))
    for a, b in [*pairs, (theme.HEALTHY, theme.SICK)]:
        assert apart(a, b) >= 9, (a, b, apart(a, b))
    assert apart("#d13438", "#107c10") < 9  # a usual red and green would not pass


def test_apply() -> None:
    """A figure gets template, height and name; without a name, or with a height of nothing, it is left as it was."""
    fig = go.Figure(go.Bar(y=[1]))
    before = fig.to_json()
    with pytest.raises(ValueError, match="alt is empty"):
        theme.apply(fig, alt=" ")
    with pytest.raises(ValueError, match="height is 0"):
        theme.apply(fig, alt="One bar.", height=0)
    assert fig.to_json() == before
    assert theme.apply(fig, alt="One bar.", height=300) is fig
    assert fig.layout.meta == {"alt": "One bar."}
    assert fig.layout.height == 300
    assert fig.layout.template.layout.plot_bgcolor == "rgba(0,0,0,0)"


def test_owner() -> None:
    """By letter or index; an unknown letter is refused by name."""
    assert theme.owner("B") == theme.owner(1) == theme.OWNERS["B"]
    assert theme.owner(len(theme.OWNERS)) == theme.OWNERS["A"]
    with pytest.raises(ValueError, match="owner 'Z' has no colour"):
        theme.owner("Z")
