from dataclasses import replace

import pytest

from data_prep.manifest import Count, Rejects, Settings
from data_prep.run import prepare
from data_prep.summary import broken_warning, bytes_per_token, rows, table_of_sizes, warnings
from tests.data_prep.conftest import make_texts


def test_rows_have_all_documents_and_all_text(manifest):
    kept, too_long = rows(manifest).values()
    texts = [text for seed in range(3) for text in make_texts(120, 60, seed=seed)]
    assert kept.documents + too_long.documents == len(texts)
    assert kept.text_bytes + too_long.text_bytes == sum(len(text.encode()) for text in texts)
    assert too_long.tokens >= 63 * too_long.documents


def test_table_shows_documents_tokens_and_bytes(manifest):
    header, kept, too_long = table_of_sizes(manifest)
    assert " ".join(header.split()) == "documents share tokens share bytes of text share"
    documents, share_of_documents, tokens, _, _, share_of_text = too_long.split()[1:]
    row = rows(manifest)["too-long"]
    assert (documents, tokens) == (f"{row.documents:,}", f"{row.tokens:,}")
    assert float(share_of_text[:-1]) > float(share_of_documents[:-1])
    assert kept.startswith("kept ")
    assert list(table_of_sizes(replace(manifest, rejects={}))) == ["rejected: nothing"]


def test_truncation_has_a_row_of_what_is_cut_off(inputs, tokenizer_folder, tmp_path):
    settings = Settings(max_tokens=64, long="truncate", valid_fraction=0.2)
    manifest = prepare(inputs, tmp_path / "cut", tokenizer_folder, settings)
    whole = prepare(inputs, tmp_path / "whole", tokenizer_folder, Settings(valid_fraction=0.2))
    found, everything = rows(manifest), rows(whole)["kept"]
    kept, cut = found["kept"], found["cut off"]
    assert kept.tokens + cut.tokens == everything.tokens
    assert kept.text_bytes + cut.text_bytes == everything.text_bytes
    for name, found in bytes_per_token(whole).items():
        assert bytes_per_token(manifest)[name] == pytest.approx(found, rel=0.02)
    assert "cut off" in "".join([*table_of_sizes(manifest)][-2:])


@pytest.mark.parametrize(
    ("records", "text_bytes", "is_warned"),
    [(40, 10, False), (41, 10, True), (1, 10**6, True), (1, 10, False)],
)
def test_more_than_a_tenth_of_broken_records_or_bytes_is_a_warning(
    manifest, records, text_bytes, is_warned
):
    """There are 360 other records, of some 60 kB."""
    broken = Rejects({"unknown": records}, ["a.jsonl:7"], {"unknown": text_bytes})
    warning = broken_warning(replace(manifest, rejects={**manifest.rejects, "not-json": broken}))
    assert (warning is not None) == is_warned
    if warning is not None:
        assert f"{records} of {records + 360:,} records" in warning
        assert f"{records} not-json (first at a.jsonl:7)" in warning
        assert "too-long" not in warning


def test_filtered_documents_are_not_broken(manifest):
    many = Rejects({"unknown": 10**6}, ["a.jsonl:7"], {"unknown": 10**9})
    for reason in ("empty", "filtered: mine: few words", "other-subset", "too-short"):
        assert broken_warning(replace(manifest, rejects={reason: many})) is None
    assert broken_warning(replace(manifest, rejects={"no-text": many})) is not None
    blank = {"train": Count(1, 1, 0), "valid": Count()}  # of a line without text
    assert broken_warning(replace(manifest, rejects={}, totals=blank)) is None


def counted(manifest, **valid):
    train = {"en": Count(10, 1_000_000, 4_000_000)}
    totals = {"train": train["en"], "valid": sum(valid.values(), Count())}
    return replace(manifest, kept={"train": train, "valid": valid}, totals=totals)


def test_a_small_validation_split_is_a_warning_with_its_error_and_what_to_do(manifest):
    manifest = replace(manifest, settings=replace(manifest.settings, valid_fraction=0.001))
    small = counted(manifest, en=Count(3, 2_811, 11_244))
    (warning,) = warnings(small)
    assert "2,811 tokens" in warning
    assert "about 0.15 nats" in warning
    assert "--valid-fraction 0.07" in warning
    assert list(warnings(counted(manifest, en=Count(3, 50_000, 200_000)))) == []
    assert list(warnings(counted(manifest))) == []  # an empty one is told by itself
    separate = replace(small, settings=replace(small.settings, valid_fraction=0.0))
    assert "for example with more text" in next(warnings(separate))
    chosen = replace(small, settings=replace(small.settings, valid_fraction=0.07))
    assert "--valid-fraction 0.09" in next(warnings(chosen))  # not what was too little
    tiny = replace(
        small, totals={"train": Count(3, 7_000, 28_000), "valid": Count(3, 2_811, 11_244)}
    )
    assert "for example with more text" in next(warnings(tiny))  # half of it would be too little


def test_text_that_the_vocabulary_spells_in_bytes_is_a_warning_that_names_its_subset(manifest):
    korean = counted(manifest, en=Count(3, 50_000, 200_000), ko=Count(2, 60_000, 66_000))
    assert bytes_per_token(korean) == {"ko": 1.1, "en": 4.0}
    (warning,) = warnings(korean)
    assert "ko 1.10" in warning
    assert "en 4" not in warning
