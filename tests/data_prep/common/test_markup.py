"""Tables of reports: no text can break them."""

from data_prep.common.markup import latex_table, markdown_table


def test_a_markdown_table_has_as_many_cells_in_each_line_whatever_they_hold():
    lines = markdown_table(("a|b", "c"), [("x\n| y |", 1), ("", "`|`")])
    assert lines[-1] == ""
    assert {line.replace(r"\|", "").count("|") for line in lines[:-1]} <= {3}
    assert len(lines) == 5


def test_a_latex_table_escapes_names_and_keeps_formulas():
    text = latex_table(["arm", "F1 & 2"], [["10 %_x", r"1 $\pm$ 2"]], "50 % {better}")
    assert r"arm & F1 \& 2 \\" in text
    assert r"10 \%\_x & 1 $\pm$ 2 \\" in text
    assert r"\caption{50 \% \{better\}}" in text
    assert r"\begin{tabular}{lr}" in text
