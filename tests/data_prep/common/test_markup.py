"""Tables of reports: no text can break them."""

from data_prep.common.markup import markdown_table


def test_a_markdown_table_has_as_many_cells_in_each_line_whatever_they_hold():
    lines = markdown_table(("a|b", "c"), [("x\n| y |", 1), ("", "`|`")])
    assert lines[-1] == ""
    assert {line.replace(r"\|", "").count("|") for line in lines[:-1]} <= {3}
    assert len(lines) == 5
