"""Reading tasks: what a file says is what is read, or its file and line are named."""

import numpy as np
import pytest

from finetune import glue, scores
from finetune.glue import Example

COLA = glue.find("CoLA")


def write(folder, content, split="train"):
    path = folder / "CoLA" / f"{split}.tsv"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_rows_become_examples_in_order(tmp_path):
    write(tmp_path, "gj04\t1\t\tHe left.\ncj99\t0\t*\tHim left.\n")
    assert COLA.read(tmp_path, "train") == [Example("He left.", 1), Example("Him left.", 0)]


def test_quotes_and_odd_separators_are_part_of_a_sentence(tmp_path):
    sentence = '"Quoted" at \u2028 the start, and one " alone \x0b inside'
    write(tmp_path, f'a\t1\t\t{sentence}\nb\t0\t*\t"\n')
    assert [e.sentence for e in COLA.read(tmp_path, "train")] == [sentence, '"']


@pytest.mark.parametrize("ending", ["\n", "\r\n", ""])
def test_the_last_line_may_end_in_any_way(tmp_path, ending):
    write(tmp_path, f"\ufeffa\t1\t\tone{ending or chr(10)}b\t0\t*\ttwo{ending}")
    assert COLA.read(tmp_path, "train") == [Example("one", 1), Example("two", 0)]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("a\t1\tno mark column", "3 tab-separated columns; accepted: 4"),
        ("a\t1\t\ttoo\tmany", "5 tab-separated columns; accepted: 4"),
        ("", "1 tab-separated columns; accepted: 4"),
        ("a\t2\t\tlabel", "label '2'; accepted: 0, 1"),
        ("a\t1\t\t ", "the sentence is empty"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, said):
    path = write(tmp_path, f"a\t1\t\tgood\n{line}\na\t1\t\tgood\n")
    with pytest.raises(ValueError, match="line 2") as caught:
        COLA.read(tmp_path, "train")
    assert str(path) in str(caught.value)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("content", "said"), [("", "is empty"), (b"a\t1\t\t\xff\n", "is not UTF-8")]
)
def test_a_bad_file_is_named(tmp_path, content, said):
    path = write(tmp_path, content, "dev")
    with pytest.raises(ValueError, match=said) as caught:
        COLA.read(tmp_path, "dev")
    assert str(path) in str(caught.value)


def test_a_missing_split_and_an_unknown_task_are_named(tmp_path):
    write(tmp_path, "a\t1\t\tgood\n", "train")
    with pytest.raises(ValueError, match=r"dev\.tsv: no such file"):
        COLA.read(tmp_path, "dev")
    with pytest.raises(ValueError, match="'cola'; accepted: CoLA"):
        glue.find("cola")


def test_the_digest_follows_the_content_of_both_splits(tmp_path):
    digests = set()
    for train, dev in (("one", "two"), ("one", "three"), ("two", "two")):
        write(tmp_path, f"a\t1\t\t{train}\n", "train")
        write(tmp_path, f"a\t1\t\t{dev}\n", "dev")
        digests.add(COLA.digest(tmp_path))
    assert len(digests) == 3


def test_real_cola_is_read_whole(real_glue):
    train, dev = (COLA.read(real_glue, split) for split in glue.SPLITS)
    assert (len(train), len(dev)) == (8551, 1043)
    # The share that the original's collapsed models scored.
    majority = scores.majority(COLA.metrics, np.array([example.label for example in dev]))
    assert majority == {"accuracy": pytest.approx(0.691, abs=5e-4), "matthews": 0.0}
