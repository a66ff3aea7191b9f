"""Reading tasks: examples are read exactly, and errors name file and line."""

import re

import datasets
import pytest

from finetune import examples, scores, tasks
from finetune.examples import Example
from finetune.protocols import PROTOCOLS
from finetune.tasks import TASKS

PAIR, QUESTION = "index|sentence1|sentence2|label", "index|question|sentence|label"
QQP = "id|qid1|qid2|question1|question2|is_duplicate"
# A file of each task in the benchmark's layout: header (None: no header line) and one row.
LAYOUTS = {
    "CoLA": (None, "gj04|1||He left.", ("He left.",), 1),
    "SST-2": ("sentence|label", "a fine film |1", ("a fine film",), 1),
    "MRPC": ("Quality|#1 ID|#2 ID|#1 String|#2 String", "0|7|8|One.|Two.", ("One.", "Two."), 0),
    "STS-B": (
        "index|genre|filename|year|old_index|source1|source2|sentence1|sentence2|score",
        "0|main-captions|MSRvid|2012test|0001|none|none|A plane.|A bird.|3.800",
        ("A plane.", "A bird."),
        0.76,
    ),
    "QQP": (QQP, "133273|213221|213222|How?|Why?|1", ("How?", "Why?"), 1),
    "MNLI": (
        "index|promptID|pairID|genre|sentence1_binary_parse|sentence2_binary_parse|sentence1_parse"
        "|sentence2_parse|sentence1|sentence2|label1|gold_label",
        "0|31193|31193n|fiction|( a )|( b )|(ROOT a)|(ROOT b)|It rains.|It pours.|neutral|neutral",
        ("It rains.", "It pours."),
        1,
    ),
    "QNLI": (QUESTION, "0|When?|In 1539.|not_entailment", ("When?", "In 1539."), 1),
    "RTE": (PAIR, "0|It is.|Is it?|entailment", ("It is.", "Is it?"), 0),
    "WNLI": (PAIR, "0|He sat.|Bob sat.|0", ("He sat.", "Bob sat."), 0),
}


def write(folder, content, split="train", task="CoLA"):
    path = folder / task / f"{split}.tsv"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def read(folder, split="train", task="CoLA"):
    return examples.read_split(TASKS[task], str(folder), split).examples


@pytest.mark.parametrize("name", TASKS)
def test_every_task_is_read_in_the_benchmark_s_own_layout(tmp_path, name):
    """With any line ending, and a byte order mark."""
    header, row, texts, label = LAYOUTS[name]
    for end, mark in (("\n", ""), ("\r\n", "\ufeff")):
        content = "".join(f"{line}{end}" for line in (header, row) if line).replace("|", "\t")
        for split in ("train", *TASKS[name].dev):
            write(tmp_path, mark + content, split, name)
            assert read(tmp_path, split, name) == [Example(texts, pytest.approx(label))]


@pytest.mark.parametrize("name", TASKS)
def test_test_sets_have_a_header_and_no_labels(tmp_path, name):
    task = TASKS[name]
    columns, texts = "\t".join(["index", *task.texts]), ("one", "two")[: len(task.texts)]
    assert task.test
    for split in task.test:
        write(tmp_path, f"{columns}\n0\t" + "\t".join(texts) + "\n", split, name)
        assert read(tmp_path, split, name) == [Example(texts)]
        write(tmp_path, f"{columns}\t{task.label}\n", split, name)
        with pytest.raises(ValueError, match=r"tsv: line 1: has labels, in column"):
            read(tmp_path, split, name)


def test_quotes_and_unusual_separators_are_part_of_a_sentence(tmp_path):
    sentence = '"Quoted" at \u2028 the start, and one " alone \x0b inside \r and'
    write(tmp_path, f'a\t1\t\t{sentence}\nb\t0\t*\t"')
    assert [e.texts for e in read(tmp_path)] == [(sentence,), ('"',)]
    write(tmp_path, f'id\tquestion1\tquestion2\tis_duplicate\n0\t"{sentence}\t"\t1\n', task="QQP")
    assert read(tmp_path, task="QQP") == [Example((f'"{sentence}', '"'), 1)]


GOOD = "a\t1\t\tgood\n"
SCORES = "sentence1\tsentence2\tscore\na\tb\t5.0\na\tb\t"
PAIRS = "index\tsentence1\tsentence2"


@pytest.mark.parametrize(
    ("task", "content", "message"),
    [
        ("CoLA", f"{GOOD}a\t1\tmark\n", "line 2: has 3 tab-separated columns; accepted: 4"),
        ("CoLA", f"{GOOD}\n{GOOD}", "line 2: has 1 tab-separated columns; accepted: 4"),
        ("CoLA", f"{GOOD}a\t2\t\tlabel\n", "line 2: label '2'; accepted: 0, 1"),
        ("CoLA", f"{GOOD}a\t1\t\t ", "line 2: the text is empty"),
        *(
            ("STS-B", f"{SCORES}{score}\n", f"3: label '{score}'; accepted: a number from 0 to 5")
            for score in ("5.1", "-0.1", "nan", "high", "")
        ),
        ("RTE", "", "is empty"),
        ("RTE", f"{PAIRS}\tlabel\n", "is empty"),
        ("RTE", b"index\tsentence1\t\xff\n", "is not UTF-8"),
        ("RTE", "index\tpremise\tsentence2\tlabel\n", "line 1: has no column 'sentence1'"),
        ("RTE", f"{PAIRS}\n0\ta\tb\n", "line 1: has no column 'label'"),
    ],
)
def test_a_bad_line_or_file_is_named(tmp_path, task, content, message):
    write(tmp_path, content, "dev", task)
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        read(tmp_path, "dev", task)
    assert str(tmp_path) in str(caught.value)
    assert task in str(caught.value)


def test_ragged_rows_are_counted_in_qqp_s_training_file_and_refused_elsewhere(tmp_path):
    rows = "id\tquestion1\tquestion2\tis_duplicate\n0\ta\tb\t1\n1\ta\t0\n2\ta\t\t0\n"
    for split in ("train", "dev"):
        write(tmp_path, rows, split, "QQP")
    found = examples.read_split(TASKS["QQP"], str(tmp_path), "train")
    assert found == examples.Split([Example(("a", "b"), 1), Example(("a", ""), 0)], skipped=1)
    with pytest.raises(ValueError, match=r"dev\.tsv: line 3: has 3 tab-separated columns"):
        read(tmp_path, "dev", "QQP")


def save(folder, columns, **splits):
    """Write a dataset with these columns, or those that a split has of its own."""
    made = {split: datasets.Dataset.from_dict({**columns, **own}) for split, own in splits.items()}
    datasets.DatasetDict(made).save_to_disk(folder)


def test_a_saved_dataset_gives_the_same_examples_and_digest_as_tsv_files(tmp_path):
    task, texts = TASKS["MNLI"], (("It rains.", "It pours."), ("He ran.", "He sat."))
    columns = dict(zip(task.hub_texts, zip(*texts, strict=True), strict=True), label=[1, 2])
    splits = ("train", "validation_matched", "validation_mismatched")
    without = {"test_matched": {"label": [-1, -1]}}
    save(tmp_path / "saved" / "mnli", columns, **dict.fromkeys(splits, {}), **without)
    tsv = "sentence1\tsentence2\tgold_label\nIt rains.\tIt pours.\tneutral\n"
    for split in ("train", *task.dev):
        write(tmp_path, f"{tsv}He ran.\tHe sat.\tcontradiction\n", split, "MNLI")
        both = [examples.read_split(task, str(tmp_path / place), split) for place in (".", "saved")]
        assert both[0] == both[1] == examples.Split([Example(texts[0], 1), Example(texts[1], 2)])
        assert examples.digest([both[0]]) == examples.digest([both[1]])
    assert read(tmp_path / "saved", "test_matched", "MNLI") == [*map(Example, texts)]
    save(tmp_path / "saved" / "cola", {"label": [0]}, train={"sentence": [None]})
    with pytest.raises(ValueError, match="cola.*: None is not text"):
        read(tmp_path / "saved", "train", "CoLA")
    with pytest.raises(ValueError, match="names no split of it; accepted: .*mnli:train"):
        read(tmp_path / "saved", "test_mismatched", "MNLI")


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"label": [2]}, "row 1: label 2; accepted: 0, 1"),
        ({"label": [0, None]}, "row 2: label None; accepted: 0, 1"),
        ({"label": [1, -1]}, "row 2: label -1; accepted: 0, 1"),
        ({"label": [0.5]}, "row 1: label 0.5; accepted: 0, 1"),
        ({}, "has no column 'label'"),
    ],
)
def test_a_saved_dataset_without_the_task_s_columns_or_labels_is_refused(
    tmp_path, columns, message
):
    texts = ["a"] * len(columns.get("label", "a"))
    save(tmp_path / "sst2", {"sentence": texts, **columns}, train={})
    with pytest.raises(ValueError, match=message):
        read(tmp_path, "train", "SST-2")


def test_the_digest_depends_on_every_split():
    one, two, three = (examples.Split([Example((text,), 1)]) for text in ("one", "two", "three"))
    splits = ([one, two], [one, three], [two, two])
    assert len({examples.digest(each) for each in splits}) == 3


SIZES = {"CoLA": (8551, 1043), "MRPC": (3668, 408), "RTE": (2490, 277), "STS-B": (5749, 1500)}
SIZES |= {"WNLI": (635, 71), "QNLI": (None, 5463), "SST-2": (67349, 872)}


@pytest.mark.parametrize(("name", "train", "dev"), [(name, *of) for name, of in SIZES.items()])
def test_real_tasks_are_read_completely_and_published_scores_of_collapsed_runs_are_marked(
    real_glue, name, train, dev
):
    task = TASKS[name]
    if train:
        assert len(read(real_glue, "train", name)) == train
    labels = tasks.truth(task, [e.label for e in read(real_glue, task.dev[0], name)])
    assert len(labels) == dev
    value = scores.score(task.metrics, labels, tasks.constant(task, labels))[task.metrics[0]]
    for printed in PROTOCOLS["published"].table.values():
        if cell := printed.get(name):
            score = float(cell.removesuffix("*"))
            is_constant = score <= round(100 * value, 1)
            if task.is_regression:
                is_constant = score >= value
            assert cell.endswith("*") == is_constant


@pytest.mark.parametrize("name", ["CoLA", "MRPC", "RTE", "STS-B", "WNLI", "QNLI"])
def test_real_test_sets_are_read(real_glue, name):
    assert len(read(real_glue, "test", name)) > 100


@pytest.mark.parametrize("name", ["MNLI", "QQP"])
def test_real_rows_of_mnli_and_qqp_are_read_by_their_headers(real_glue, tmp_path, name):
    content = (real_glue / name / "train_subset.tsv").read_bytes()
    write(tmp_path, content, task=name)
    assert len(read(tmp_path, task=name)) == 8999
