"""The page of a lab: how to open it, and the answers folded away until they are asked for.

A solution's page is the lab's page. Under its title stand the ways to work on it; each answer is a `<details>`, which needs no
script. The notebooks and the package they need lie in `_static/labs`, to be downloaded from the site they belong to.
"""

from __future__ import annotations

import re
import shutil
from html import escape
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

from .lite import archive
from .lite import labs as browser_labs

FOLDER = "_static/labs"
PACKAGE = "kvlab.zip"
IN_BROWSER = (
    "In the browser the exercises, their checks and all that only counts run on what you write; cells that need the model show what "
    "was recorded. To run those too, take Colab or a Python of your own: "
)
NEEDS_KERNEL = "This lab’s exercises work on tensors. It needs a Python with PyTorch, Colab’s or your own: "


def is_lab(name: str) -> bool:
    """Whether a document is a lab's page."""
    return re.fullmatch(r"solutions/\d\d-\w+", name) is not None


def fold_answers(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Put each exercise's answer into a `<details>` that names the function."""
    if not is_lab(docname) or app.builder.format != "html":
        return
    for cell in doctree.findall(lambda node: isinstance(node, nodes.container) and "tag_exercise" in node["classes"]):
        name = re.search(r"def (\w+)\(", cell.astext())
        summary = f"An answer: <code>{escape(name[1])}</code>" if name else "An answer"
        cell.insert(0, nodes.raw("", f'<details class="kv-answer"><summary>{summary}</summary>', format="html"))
        cell.append(nodes.raw("", "</details>", format="html"))


def bar(lab: str, to: Any, *, in_browser: bool, repository: str) -> str:
    """The row of ways to work on a lab. `to(path)` gives the address of a file of the site."""
    file = f"{lab}.ipynb"
    colab = (
        f"https://colab.research.google.com/github/{repository}/blob/main/labs/{file}"
        if repository
        else to("book/setup.html") + "#colab"
    )
    lite = f'<a class="kv-button kv-main" href="{to("lite/notebooks/index.html")}?path={file}" target="_blank" data-lite>Open in the browser</a>'
    return (
        '<div class="kv-lab" role="group" aria-label="Work on this lab"><p>'
        + (lite if in_browser else "")
        + f'<a class="kv-button" href="{escape(colab)}">{"Open in Colab" if repository else "How to open in Colab"}</a>'
        + f'<a class="kv-button" href="{to(f"{FOLDER}/{file}")}" download>Download the notebook</a>'
        + '<button type="button" class="kv-button" data-answers aria-pressed="false" hidden>Show the answers</button></p>'
        + f'<p class="kv-lab-says" role="status">{IN_BROWSER if in_browser else NEEDS_KERNEL}'
        + f'<a href="{to("book/setup.html")}">Set up</a>.</p></div>'
    )


def add_bar(app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: Any) -> None:
    """Put the row under the title of a lab's page."""
    if not is_lab(pagename) or "body" not in context:
        return
    lab = pagename.split("/")[1]
    html = bar(
        lab,
        lambda path: context["pathto"](path, resource=True),
        in_browser=lab in browser_labs(Path(app.confdir)),
        repository=app.config.shared_state_repository,
    )
    context["body"] = context["body"].replace("</h1>", "</h1>\n" + html, 1)
    app.add_css_file("css/lab.css")
    app.add_js_file("js/lab.js", defer="defer")


def package(root: Path) -> bytes:
    """The library as an archive that pip installs: what is needed to run the labs, and no more of the course."""
    names = [root / "pyproject.toml", root / "README.md", *(path for path in (root / "kvlab").rglob("*") if path.is_file())]
    return archive(
        {f"kvlab/{path.relative_to(root).as_posix()}": path.read_bytes() for path in names if "__pycache__" not in path.parts}
    )


def copy_labs(app: Sphinx, exception: Exception | None) -> None:
    """Put the notebooks and the package into the site."""
    if exception is not None or app.builder.format != "html":
        return
    root, folder = Path(app.confdir), Path(app.outdir, FOLDER)
    notebooks = sorted((root / "labs").glob("[0-9]*.ipynb"))
    if not notebooks:
        return
    folder.mkdir(parents=True, exist_ok=True)
    for path in notebooks:
        shutil.copyfile(path, folder / path.name)
    (folder / PACKAGE).write_bytes(package(root))


def setup(app: Sphinx) -> None:
    """Connect to the pages and the end of the build."""
    # owner/name of the public repository, if there is one: Colab's button then opens the notebook from there
    app.add_config_value("shared_state_repository", "", "html")
    app.connect("doctree-resolved", fold_answers)
    app.connect("html-page-context", add_bar)
    app.connect("build-finished", copy_labs)
