"""Tables of reports, as Markdown."""

from collections.abc import Iterable, Sequence


def markdown_table(names: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Return the lines of a table, with a blank one after it; no cell can break it.

    Args:
        names: Of the columns.
        rows: Their cells.
    """
    cells = (map(_in_one_cell, row) for row in (names, ["---"] * len(names), *rows))
    return [*(f"| {' | '.join(row)} |" for row in cells), ""]


def _in_one_cell(value: object) -> str:
    return " ".join(str(value).replace("|", r"\|").split())
