from dataclasses import replace

import pytest

from data_prep.common.wording import in_short
from data_prep.manifest import Count, Rejects
from data_prep.report import by_subset, draw, shares


def test_figure_is_a_png_and_depends_only_on_the_content(manifest, tmp_path):
    rejects = {
        "too-long": Rejects({"Books3": 5, "Pile-CC": 7}, [], {"Books3": 9, "Pile-CC": 3}),
        "empty": Rejects({"Pile-CC": 2}, [], {"Pile-CC": 0}),
        "not-json": Rejects({"unknown": 2}, [], {"unknown": 50}),
    }
    turned = {reason: rejects[reason] for reason in reversed(rejects)}
    for name, content in {"a": rejects, "b": turned, "c": {}}.items():
        draw(replace(manifest, rejects=content), tmp_path / f"{name}.png")
    a, b, c = ((tmp_path / f"{name}.png").read_bytes() for name in "abc")
    assert a.startswith(b"\x89PNG")
    assert a == b
    assert a != c
    assert {file.name for file in tmp_path.iterdir()} == {"a.png", "b.png", "c.png"}


@pytest.mark.parametrize("name", ["$5_$10", "$x$", "a_{$b$", "\\frac$"])
def test_names_of_subsets_are_drawn_as_they_are_and_not_as_formulas(manifest, tmp_path, name):
    from matplotlib.mathtext import MathTextParser

    kept = {split: {name: counts["Pile-CC"]} for split, counts in manifest.kept.items()}
    rejects = {"too-long": Rejects({name: 5}, [], {name: 9})}

    def parse(_, text, *more):
        raise AssertionError(text)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MathTextParser, "parse", parse)
        draw(replace(manifest, kept=kept, rejects=rejects), tmp_path / "corpus.png")
    assert (tmp_path / "corpus.png").is_file()


def test_smallest_of_many_subsets_are_merged():
    kept = {"train": {f"{n:03d}": Count(1, 1000 - n, 0) for n in range(100)}, "valid": {}}
    rows = by_subset(kept)
    assert list(rows)[:2] == ["000", "001"]
    assert list(rows)[-1] == "the rest"
    assert sum(row["train"] for row in rows.values()) == sum(1000 - n for n in range(100))


def test_shares_of_a_subset_are_of_its_text_and_sum_to_one(manifest):
    rows = shares(manifest)
    rejects = manifest.rejects["too-long"]
    kept = sum(subsets["Books3"].text_bytes for subsets in manifest.kept.values())
    lost = rejects.text_bytes["Books3"]
    assert rows["Books3"]["too-long"] == pytest.approx(lost / (kept + lost))
    assert set(rows) == {"Books3", "Pile-CC"}
    for row in rows.values():
        assert sum(row.values()) == pytest.approx(1)
        assert set(row) == {"kept", "too-long"}


@pytest.mark.parametrize(
    ("number", "words"), [(0, "0"), (7, "7"), (1234, "1.23 k"), (2.5e6, "2.5 M"), (3e11, "300 G")]
)
def test_numbers_are_short(number, words):
    assert in_short(number) == words
