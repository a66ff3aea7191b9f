"""Tables of reports, as Markdown and as LaTeX."""

from collections.abc import Iterable, Sequence

_LATEX = str.maketrans(
    {character: rf"\{character}" for character in "&%#_${}"}
    | {"\\": r"\textbackslash{}", "^": r"\textasciicircum{}", "~": r"\textasciitilde{}"}
    | {"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}"}
)


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


def latex_table(names: Sequence[str], rows: Iterable[Sequence[str]], caption: str) -> str:
    """Return a table for the package booktabs.

    Args:
        names: Of the columns; they, the first cell of each row and the caption are plain text.
        rows: Their cells, of which all but the first may have formulas.
        caption: Below the table.
    """
    head, *lines = (
        " & ".join(row) + r" \\"
        for row in (map(_escaped, names), *([_escaped(row[0]), *row[1:]] for row in rows))
    )
    return "\n".join(
        [
            r"\begin{table}",
            r"\centering",
            rf"\begin{{tabular}}{{l{'r' * (len(names) - 1)}}}",
            *(r"\toprule", head, r"\midrule", *lines, r"\bottomrule"),
            r"\end{tabular}",
            rf"\caption{{{_escaped(caption)}}}",
            r"\end{table}",
            "",
        ]
    )


def _escaped(text: str) -> str:
    """Escape what LaTeX would read in a text."""
    return text.translate(_LATEX)
