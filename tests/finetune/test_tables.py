"""Rows of examples are read alike from every format, and errors name file and line."""

import json
import math

import datasets
import huggingface_hub.constants
import pyarrow.parquet
import pytest

from finetune import tables
from tests.hub import hub_of

ROWS = [("good, with a comma", "1"), ('two\nlines and "quotes"', "2"), ("", "1")]
CSV = '\ufefftext,label\n"good, with a comma",1\n"two\nlines and ""quotes""",2\n\n"",1\n'
JSON_LINES = "\n".join(json.dumps({"text": text, "label": int(label)}) for text, label in ROWS)


def rows_of(source):
    return [tuple(map(tables.text, row.values.values())) for row in tables.read_rows(str(source))]


def made(*labels):
    names = datasets.ClassLabel(names=["1", "2"])
    columns = {"text": [text for text, _ in ROWS], "label": labels or [label for _, label in ROWS]}
    features = datasets.Features({"text": datasets.Value("string"), "label": names})
    return datasets.Dataset.from_dict(columns, features=features)


def write_parquet(path):
    columns = {"text": [t for t, _ in ROWS], "label": [float(label) for _, label in ROWS]}
    datasets.Dataset.from_dict(columns).to_parquet(path)


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("a.csv", lambda path: path.write_text(CSV, encoding="utf-8")),
        ("a.jsonl", lambda path: path.write_text(JSON_LINES)),
        ("a.parquet", write_parquet),
        ("saved", lambda path: made().save_to_disk(path)),
        (
            "splits:train",
            lambda path: datasets.DatasetDict(train=made()).save_to_disk(path.with_name("splits")),
        ),
    ],
)
def test_every_format_gives_the_same_rows(tmp_path, name, write):
    write(tmp_path / name)
    assert rows_of(tmp_path / name) == [(text.strip(), label) for text, label in ROWS]


def test_rows_without_a_label_have_an_empty_one(tmp_path):
    """The hub's test sets have -1."""
    made(1, None, -1).save_to_disk(tmp_path / "saved")
    assert [label for _, label in rows_of(tmp_path / "saved")] == ["2", "", ""]
    assert tables.text(math.nan) == ""


def test_places_are_the_lines_where_rows_begin(tmp_path):
    (tmp_path / "a.csv").write_text(CSV, encoding="utf-8")
    places = [row.place.rpartition(": ")[2] for row in tables.read_rows(str(tmp_path / "a.csv"))]
    assert places == ["line 2", "line 3", "line 6"]


def test_a_quotation_mark_and_a_carriage_return_in_a_tsv_file_are_text(tmp_path):
    (tmp_path / "a.tsv").write_bytes(b'text\tlabel\r\n"one\r two\t1\r\n\r\n')
    (row,) = tables.read_rows(str(tmp_path / "a.tsv"))
    assert row.values == {"text": '"one\r two', "label": "1"}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "text,label\na,b,c\n", "a.csv: line 2: has 3 fields, the header line has 2"),
        ("a.tsv", "text\tlabel\n\na\n", "a.tsv: line 3: has 1 fields, the header line has 2$"),
        ("a.csv", 'text,label\nx,1\n"a,b\n', "a.csv: line 3: unexpected end"),
        ("a.csv", "text,text\n", "line 1: column 'text' is there twice"),
        ("a.csv", "text;label\na, b;1\n", "line 1: 'text;label': separate columns with commas"),
        ("a.csv", "text,label\n", "a.csv: is empty"),
        ("a.csv", "", "a.csv: is empty"),
        ("a.jsonl", '{"a": 1}\n[1]\n', "a.jsonl: line 2: is not a JSON object"),
        ("a.jsonl", '{"a": 1}\n{"a"\n', "a.jsonl: line 2: is not valid JSON"),
        ("a.jsonl", '{"a": 1, "b": 2, "a": 3}', "line 1: .* key 'a' is there twice"),
        ("a.parquet", "no", "a.parquet: cannot be read as parquet"),
        ("late.parquet", None, "late.parquet: cannot be read as parquet: days=2147483647"),
        ("datasets:a:b:c:d:e:f:g:h:i:j:k:l", None, "l: cannot be loaded"),
        ("a.xlsx", "", "unknown format '.xlsx'; accepted: .csv"),
        ("a.csv", b"text\n\xff\n", "a.csv: is not UTF-8"),
        ("none.csv", None, "none.csv: no such file"),
        ("splits", None, "splits: names no split of it; accepted: .*splits:train"),
    ],
)
def test_what_is_broken_or_not_there_is_refused_by_name_and_line(tmp_path, name, content, message):
    datasets.DatasetDict(train=made()).save_to_disk(tmp_path / "splits")
    late = pyarrow.array([2**31 - 1], pyarrow.date32())  # after Python's last year
    pyarrow.parquet.write_table(
        pyarrow.table({"text": ["a"], "when": late}), tmp_path / "late.parquet"
    )
    if content is not None:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message):
        tables.read_rows(name if name.startswith("datasets:") else str(tmp_path / name))


def test_a_data_set_of_the_hub_needs_its_split():
    with pytest.raises(ValueError, match=r"datasets:imdb: .*no split .*accepted: .*NAME:SPLIT"):
        tables.read_rows("datasets:imdb")


def test_where_the_hub_does_not_answer_its_cache_is_used_at_once(tmp_path, capsys):
    """The library would ask it again for every split, for half a minute each."""
    with hub_of(tmp_path):
        huggingface_hub.constants.ENDPOINT = "http://127.0.0.1:9"  # nobody is there
        for split in ("train", "dev"):
            with pytest.raises(ValueError, match=f"datasets:a/b:{split}: cannot be loaded"):
                tables.load(f"datasets:a/b:{split}")
        assert huggingface_hub.constants.HF_HUB_OFFLINE
    assert capsys.readouterr().err.count("127.0.0.1:9 does not answer") == 1
