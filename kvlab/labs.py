"""Where the labs' notebooks are."""

from pathlib import Path

import kvlab


def labs() -> dict[str, Path]:
    """Each lab's notebook by its name, as in `03-password`: of the checkout, else of the current folder."""
    checkout = Path(kvlab.__file__).resolve().parents[1] / "labs"
    folder = checkout if checkout.is_dir() else Path("labs")
    return {path.stem: path for path in sorted(folder.glob("[0-9][0-9]-*.ipynb"))}
