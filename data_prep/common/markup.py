"""Tables: as Markdown for reports, and aligned for a terminal."""

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


def text_table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table for a terminal; a column of numbers ends at its right edge.

    Args:
        names: Of the columns.
        rows: Their cells.
    """
    columns = []
    for name, *cells in zip(names, *rows, strict=True):
        width = max(map(len, (name, *cells)))
        align = str.rjust if all(cell[:1] in "-0123456789" for cell in cells) else str.ljust
        columns.append([align(cell, width) for cell in (name, *cells)])
    return ["  ".join(row).rstrip() for row in zip(*columns, strict=True)]
