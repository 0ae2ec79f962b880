"""The labs are made from the solutions: the same each time, without answers, and they stop where they should."""

import make_labs
import nbformat
import pytest

SOLUTIONS = sorted((make_labs.ROOT / "solutions").glob("[0-9]*.md"))


@pytest.mark.parametrize("source", SOLUTIONS, ids=lambda path: path.stem)
def test_regenerating_a_lab_gives_no_diff(source):
    committed = (make_labs.ROOT / "labs" / f"{source.stem}.ipynb").read_text(encoding="utf-8")
    assert make_labs.make(source) == committed, "run `make labs` and commit the result"
    assert make_labs.make(source) == make_labs.make(source)


@pytest.mark.parametrize("source", SOLUTIONS, ids=lambda path: path.stem)
def test_a_lab_has_no_answers_and_no_outputs(source):
    notebook = nbformat.reads(make_labs.make(source), as_version=4)
    text = "\n".join(cell.source for cell in notebook.cells)
    assert "BEGIN SOLUTION" not in text
    graded = [cell for cell in notebook.cells if cell.metadata.get("nbgrader", {}).get("grade")]
    answers = [cell for cell in notebook.cells if cell.metadata.get("nbgrader", {}).get("solution")]
    assert 2 <= len(answers) <= 5 and len(graded) == len(answers)
    assert all("NotImplementedError" in cell.source for cell in answers)
    assert all(not cell.outputs for cell in notebook.cells if cell.cell_type == "code")
    assert len({cell.id for cell in notebook.cells}) == len(notebook.cells)


HEAD = "---\njupytext:\n  text_representation: {extension: .md, format_name: myst}\nkernelspec: {display_name: Python 3, language: python, name: python3}\n---\n"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("```{code-cell} python3\n:tags: [exercise]\n\ndef f(x):\n    return x\n```\n", "BEGIN SOLUTION"),
        ("```{code-cell} python3\n:tags: [check]\n\nchecks.F.check(f)\n```\n", "points"),
        ("```{code-cell} python3\n:tags: [check]\n:points: many\n\nchecks.F.check(f)\n```\n", "points"),
        (
            "```{code-cell} python3\n:tags: [exercise]\n\ndef f(x):\n    ### BEGIN SOLUTION\n    y = 1\n    ### END SOLUTION\n    return 42\n```\n",
            "after ### END SOLUTION",
        ),
        ("# Title\n\n:::{note}\nnot Markdown\n:::\n", "MyST"),
        ("A {glue:text}`number` from somewhere.\n", "MyST"),
    ],
)
def test_a_source_that_would_make_a_broken_lab_is_refused(tmp_path, body, says):
    source = tmp_path / "99-broken.md"
    source.write_text(HEAD + body)
    with pytest.raises(ValueError, match=says):
        make_labs.make(source)


@pytest.mark.model
@pytest.mark.parametrize("source", SOLUTIONS, ids=lambda path: path.stem)
def test_an_unfinished_lab_stops_at_the_first_exercise_with_one_sentence(source):
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError

    notebook = nbformat.reads(make_labs.make(source), as_version=4)
    with pytest.raises(CellExecutionError):
        NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    errors = [
        (cell, output)
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
        if output.output_type == "error"
    ]
    assert len(errors) == 1
    cell, error = errors[0]
    assert cell.metadata["nbgrader"]["grade"], "it stops in a check, not in the reader's code"
    assert error.ename == "Unfinished" and "Exercise 1" in error.evalue
    assert error.traceback == [error.evalue], "one sentence and no traceback"
