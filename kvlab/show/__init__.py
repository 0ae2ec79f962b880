"""Figures and widgets: the only part of kvlab that imports plotly or ipywidgets. A figure takes a `Run`."""
