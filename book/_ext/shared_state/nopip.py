"""In place of `micropip` and `piplite` in the notebooks of the site: what a lab needs is there, and nothing else is fetched."""

SAYS = "This notebook runs in the browser from files of the course alone: it installs nothing. Another package needs a kernel of its own."


async def install(*packages: object, **options: object) -> None:
    """Raises RuntimeError."""
    raise RuntimeError(SAYS)


async def get_transformed_code(argv: list[str]) -> str:
    """What a cell with `%pip` is turned into."""
    return f"raise RuntimeError({SAYS!r})"
