"""Names that installed packages add to a table."""

import sys

import pytest

from data_prep.common.plugins import Plugins, names_of

GROUP = "zeroclap.filters"


def test_a_table_lists_installed_names_and_imports_only_what_is_asked_for(example_package):
    table = Plugins(GROUP, {"ours": str.strip})
    assert names_of(table) == ["ours", "gone", "no-short"]
    assert [*table.values()] == [str.strip]
    assert "no-short" in table
    assert "zeroclap_example" not in sys.modules
    assert table["no-short"]("two words", "") == "few-words"
    assert "zeroclap_example.filters" in sys.modules
    assert (table.package("no-short"), table.package("ours")) == (["zeroclap-example"], [])


def test_a_name_of_ours_is_ours_whatever_is_installed(example_package):
    assert Plugins(GROUP, {"no-short": str.strip})["no-short"] is str.strip


def test_what_cannot_be_imported_is_named(example_package):
    with pytest.raises(ValueError, match=r"gone \(zeroclap_example.gone:nothing\): .*No module"):
        Plugins(GROUP, {})["gone"]


def test_a_name_that_two_packages_register_is_refused(example_package, tmp_path, monkeypatch):
    metadata = tmp_path / "other-2.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Name: other\nVersion: 2.0\n")
    (metadata / "entry_points.txt").write_text(f"[{GROUP}]\nno-short = other:keep\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"no-short is registered twice: .*other 2\.0 \(other:"):
        Plugins(GROUP, {})["no-short"]


def test_nothing_is_installed_without_the_package():
    assert names_of(Plugins(GROUP, {})) == []
