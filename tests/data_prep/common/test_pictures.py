"""The style of pictures, and how they are written."""

from pathlib import Path

import pytest

from data_prep.common.pictures import check_file, legend_below, picture


@pytest.mark.parametrize(
    ("name", "start"), [("a.png", b"\x89PNG"), ("a.svg", b"<?xml"), ("a.pdf", b"%PDF")]
)
def test_the_suffix_says_the_form_and_the_same_content_gives_the_same_bytes(tmp_path, name, start):
    found = []
    for _ in range(2):
        with picture(2, 2, tmp_path / "b.svg", tmp_path / name) as figure:
            figure.subplots().plot([1, 2], label="a")
            legend_below(figure)
        found.append((tmp_path / name).read_bytes())
    assert found[0].startswith(start)
    assert (tmp_path / "b.svg").exists()
    assert found[0] == found[1]


def test_a_picture_that_fails_leaves_no_file(tmp_path):
    with pytest.raises(ZeroDivisionError), picture(2, 2, tmp_path / "a.png"):
        _ = 1 / 0
    assert not list(tmp_path.iterdir())


def test_other_suffixes_are_refused():
    with pytest.raises(
        ValueError, match=r"^--plot a\.gif: the name has to end in \.png, \.svg, \.pdf$"
    ):
        check_file(Path("a.gif"))


def test_a_legend_has_each_label_once_and_is_outside_all_axes(tmp_path):
    with picture(4, 3, tmp_path / "a.png") as figure:
        for axes in figure.subplots(1, 2):
            axes.plot([1, 2], label="a")
            axes.plot([2, 1], label="b")
        legend_below(figure)
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["a", "b"]
    lowest = min(axes.get_tightbbox().y0 for axes in figure.axes)
    assert legend.get_window_extent().y1 <= lowest


def test_thirty_two_curves_are_told_apart(tmp_path):
    with picture(4, 3, tmp_path / "a.png") as figure:
        lines = [figure.gca().plot([1, 2])[0] for _ in range(32)]
    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == 32
