"""Tables of reports, as Markdown."""

from collections.abc import Iterable, Sequence


def markdown_table(names: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Return the lines of a table, with a blank one after it; no cell can break it.

    Args:
        names: Of the columns.
        rows: Their cells.
    """
    cells = (
        [" ".join(str(value).replace("|", r"\|").split()) for value in row]
        for row in (names, ["---"] * len(names), *rows)
    )
    return [*(f"| {' | '.join(row)} |" for row in cells), ""]
