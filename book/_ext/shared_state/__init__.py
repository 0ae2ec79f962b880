"""What makes the built site self-contained: figures, widgets, fonts and math come from the site and nowhere else.

Uses Sphinx and myst-nb only, so that it outlives Jupyter Book 1.x. Three parts:

- `figures`: Plotly output becomes a named, lazily drawn figure;
- `vendor`: the files of other people that the pages load are copied into the site;
- `rerun`: a notebook is executed again when the library or the results it uses change.
"""

from sphinx.application import Sphinx

from . import figures, rerun, vendor


def setup(app: Sphinx) -> dict[str, object]:
    """Connect the three parts to Sphinx."""
    figures.setup(app)
    vendor.setup(app)
    rerun.setup(app)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
