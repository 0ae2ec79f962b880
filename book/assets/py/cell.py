"""Run a cell as a notebook does, and say what came of it. The page's kernel loads this file; nothing else of it is Python."""

import ast
import json
import linecache
import traceback


def run(source: str, namespace: dict, name: str, raw: bool = False) -> str:
    """Run `source`; return JSON with the last expression's `value` as text, a `figure`, or an `error` as a traceback.

    A last value with `data` and `layout`, or with `to_plotly_json`, is a figure. With `raw` a str is returned without quotes.
    """
    # a traceback shows the cell's own lines
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    try:
        tree = ast.parse(source, name)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, name, "exec"), namespace)
        value = None if last is None else eval(compile(ast.Expression(last.value), name, "eval"), namespace)
        if figure := _figure(value):
            return json.dumps({"figure": figure})
        text = value if raw and isinstance(value, str) else repr(value)
    except BaseException as error:  # SystemExit and KeyboardInterrupt end a cell, not the kernel
        return json.dumps({"error": _traceback(error, name)})
    return json.dumps({"value": None if value is None else text})


def _figure(value: object) -> dict | None:
    if hasattr(value, "to_plotly_json"):
        value = value.to_plotly_json()
    if isinstance(value, dict) and isinstance(value.get("data"), list) and isinstance(value.get("layout"), dict):
        return json.loads(json.dumps({"data": value["data"], "layout": value["layout"], "frames": value.get("frames", [])}))
    return None


def _traceback(error: BaseException, name: str) -> str:
    """The traceback from the cell on: how the cell came to run is not the reader's concern."""
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename != name:
        frame = frame.tb_next
    return "".join(traceback.format_exception(type(error), error, frame))
