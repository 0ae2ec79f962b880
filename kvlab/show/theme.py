"""One look for every figure: the colours, the Plotly template, and `apply`, which gives a figure both and a name.

The site's style sheet holds the same colours as CSS variables; a test keeps the two equal. Each colour has at least 3:1
contrast with the page in light and in dark mode, so one figure serves both. A notebook, whose mode is not known, shows it on
paper; the site draws it on the page.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import plotly.graph_objects as go

# Who owns a block, a row, a request. The first four and SHARED stay apart under protanopia and deuteranopia too.
OWNERS = {
    "A": "#4a80ee",
    "B": "#ac4a12",
    "C": "#9140b4",
    "D": "#3b9c91",
    "E": "#8a7d3a",
    "F": "#c2628f",
}
SHARED = "#b08818"  # a system prompt or a prefix that several requests read
PAD = "#8a8f9a"  # padding: draw it hatched, colour alone does not tell it from D
FREE = "rgba(128, 138, 152, 0.22)"  # a block that nobody holds
HEALTHY = "#5d7d97"  # a run within the bound
SICK = "#dd2854"  # a state fault

# The page, in light mode; the site swaps these for its own in dark mode.
INK = "#1f2328"
MUTED = "#5a616b"
GRID = "#dcd8cd"
PAPER = "#fbfaf6"

FONT = '"IBM Plex Sans", system-ui, sans-serif'
# Magnitude: reads in grey, in colour and by the colour-blind. Difference from healthy to sick, for |Δlogit| and KL.
SEQUENTIAL = "Cividis"
HEALTHY_TO_SICK = [[0.0, "#5d7d97"], [0.5, "#a18795"], [1.0, "#dd2854"]]


def owner(name: str | int) -> str:
    """Return the colour of an owner: a letter of `OWNERS`, or its index; past the last one they start again."""
    if isinstance(name, str):
        try:
            return OWNERS[name]
        except KeyError:
            raise ValueError(f"owner {name!r} has no colour: use one of {', '.join(OWNERS)}, or an index") from None
    return list(OWNERS.values())[name % len(OWNERS)]


def template() -> go.layout.Template:
    """Return the Plotly template of the course: the course's type and colours, quiet axes."""
    import plotly.graph_objects as go

    axis = {
        "gridcolor": GRID,
        "linecolor": MUTED,
        "zerolinecolor": GRID,
        "tickcolor": MUTED,
        "ticks": "outside",
        "ticklen": 4,
        "automargin": True,
        "title": {"standoff": 10, "font": {"color": INK}},
    }
    return go.layout.Template(
        layout={
            "font": {"family": FONT, "size": 14, "color": INK},
            # both outside the plot and with room of their own: title on top, legend at the foot
            "title": {
                "font": {"size": 16},
                "x": 0,
                "xref": "container",
                "y": 1,
                "yref": "container",
                "yanchor": "top",
                "pad": {"t": 6, "b": 10, "l": 4},
                "automargin": True,
            },
            "paper_bgcolor": PAPER,
            "plot_bgcolor": "rgba(0,0,0,0)",
            "colorway": list(OWNERS.values()),
            "xaxis": axis,
            "yaxis": axis,
            "legend": {
                "orientation": "h",
                "x": 0,
                "xanchor": "left",
                "y": 0,
                "yref": "container",
                "yanchor": "bottom",
                "title": {"text": ""},
            },
            "hoverlabel": {"bgcolor": PAPER, "bordercolor": MUTED, "font": {"color": INK}},
            "hovermode": "closest",
            "margin": {"l": 56, "r": 16, "t": 32, "b": 48},
            "bargap": 0.25,
        }
    )


def apply(fig: go.Figure, *, alt: str, height: int = 450) -> go.Figure:
    """Give a figure the course's look, its height in CSS pixels and its accessible name; return the same figure.

    `alt` says in a sentence what the figure shows: it is what a screen reader reads. The site draws the figure
    narrower on a phone and follows the reader's light or dark mode.
    """
    if not alt or not alt.strip():
        raise ValueError("alt is empty: say in a sentence what the figure shows")
    if height < 100:
        raise ValueError(f"height is {height}: give CSS pixels, at least 100")
    return fig.update_layout(template=template(), meta={"alt": alt.strip()}, height=height)


def switch(fig: go.Figure, buttons: list[dict], *, dropdown: bool = False, name: str | None = None, y: float = 1.02) -> None:
    """Put plotly `buttons` above the plot's left edge, the first of them on; as a drop-down list where there are many.

    The site draws them as page controls; `name` is what a screen reader calls them.
    """
    menu = {"type": "dropdown", "direction": "down"} if dropdown else {"type": "buttons", "direction": "right"}
    place = {"x": 0, "xanchor": "left", "y": y, "yanchor": "bottom"}
    fig.update_layout(updatemenus=[menu | ({"name": name} if name else {}) | place | {"buttons": buttons, "active": 0}])
