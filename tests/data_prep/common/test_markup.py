"""Tables of reports: no text can break them."""

from data_prep.common.markup import markdown_table, text_table


def test_a_markdown_table_has_as_many_cells_in_each_line_whatever_they_hold():
    lines = markdown_table(("a|b", "c"), [("x\n| y |", 1), ("", "`|`")])
    assert lines[-1] == ""
    assert {line.replace(r"\|", "").count("|") for line in lines[:-1]} <= {3}
    assert len(lines) == 5


def test_columns_of_a_table_for_a_terminal_are_aligned_numbers_at_their_right():
    rows = [("web", "1,200", "-"), ("books, old", "7", "33.3%"), ("", "", "")]
    assert text_table(("", "blocks", "share of all"), rows) == [
        "            blocks  share of all",
        "web          1,200             -",
        "books, old       7         33.3%",
        "",
    ]
    assert text_table(("steps", "why"), []) == ["steps  why"]
