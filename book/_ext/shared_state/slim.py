"""Take out of the theme what every page would load and none needs.

The theme brings Font Awesome three times: 1.5 MB of script, 156 KB of font, and a third of its style sheet. The pages show a
dozen of its icons. These are cut out of the script at build time and put into the style sheet as masks, in the text's
colour; script and font stay out (`_templates/static/webpack-macros.html`).
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from urllib.parse import quote

from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

# What the theme's templates and scripts show; a test looks for one that is missing
ICONS = (
    "angle-left", "angle-right", "arrow-up", "bars", "chevron-down", "circle-half-stroke", "download", "expand", "file",
    "file-lines", "file-pdf", "home", "list", "magnifying-glass", "moon", "outdent", "pencil", "sun", "xmark",
)  # fmt: skip
NOTICE = "/* Icons of Font Awesome Free (fontawesome.com), CC BY 4.0, cut out of the theme's copy */"
# The last two undo what the theme does to an icon that its script has not yet turned into an svg
RULES = """
:is(.fa,.fas,.far,.fa-solid,.fa-regular){display:inline-block;width:calc(var(--w)*1em);height:1em;vertical-align:-.125em;\
line-height:1;background:currentColor;-webkit-mask:var(--icon) center/100% 100% no-repeat;mask:var(--icon) center/100% 100% no-repeat}
.fa-lg{font-size:1.25em}
form.bd-search .fa-solid.fa-magnifying-glass{position:static;flex:none}
button.search-button-field>.fa-solid{display:inline-block}
@media (forced-colors:active){:is(.fa,.fas,.far,.fa-solid,.fa-regular){forced-color-adjust:none;background:LinkText}}
@media print{:is(.fa,.fas,.far,.fa-solid,.fa-regular){print-color-adjust:exact}}
"""
ICON = re.compile(r'[{,]"?([a-z0-9-]+)"?:\[(\d+),(\d+),\[([^\]]*)\],"\w+","([^"]+)"')
FACE = re.compile(r"@font-face\{[^}]*fontawesome[^}]*\}")
GLYPH = re.compile(r'(?:\.fa-[a-z0-9-]+:before,?)+\{content:"[^"]*"\}')


@cache
def icons_css(script: str) -> str:
    """Return the style rules for `ICONS`, their shapes taken from the text of Font Awesome's script."""
    shapes = {}
    for name, width, height, aliases, path in ICON.findall(script):
        for each in (name, *re.findall(r'"([a-z0-9-]+)"', aliases)):
            shapes.setdefault(each, (int(width), int(height), path))
    rules = []
    for name in ICONS:
        if name not in shapes:
            raise ExtensionError(f"the theme's fontawesome.js has no icon {name!r}: see slim.ICONS")
        width, height, path = shapes[name]
        svg = f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}'><path d='{path}'/></svg>"
        rules.append(f'.fa-{name}{{--w:{width / height:g};--icon:url("data:image/svg+xml,{quote(svg, safe=" =/:,")}")}}')
    return NOTICE + RULES + "\n".join(rules) + "\n"


def slim_css(css: str, icons: str) -> str:
    """Return the theme's style sheet with `icons` in place of Font Awesome's rules."""
    start, faces = css.find("/*!\n * Font Awesome"), list(FACE.finditer(css))
    if start < 0 or not faces or faces[-1].end() < start:
        raise ExtensionError("the theme's style sheet no longer holds Font Awesome where slim.py looks for it")
    return GLYPH.sub("", css[:start] + icons + css[faces[-1].end() :])


def slim_theme(app: Sphinx, exception: Exception | None) -> None:
    """Rewrite the theme's style sheet in the site, and remove what no page asks for any more."""
    static = Path(app.outdir, "_static")
    sheet, script = static / "styles" / "pydata-sphinx-theme.css", static / "scripts" / "fontawesome.js"
    if (
        exception is not None
        or app.builder.format != "html"
        or not sheet.exists()
        or NOTICE in (css := sheet.read_text("utf8"))
    ):
        return
    sheet.write_text(slim_css(css, icons_css(script.read_text("utf8"))), "utf8")


def setup(app: Sphinx) -> None:
    """Connect to the end of the build, when the theme's files are in place."""
    app.connect("build-finished", slim_theme)
