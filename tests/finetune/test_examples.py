"""Reading tasks: examples are read exactly, and errors name file and line."""

import pytest

from finetune import examples, scores, tasks
from finetune.examples import Example
from finetune.protocols import PROTOCOLS
from finetune.tasks import LEAST_EXPLAINED, TASKS

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
    "QQP": (
        "id|qid1|qid2|question1|question2|is_duplicate",
        "133273|213221|213222|How?|Why?|1",
        ("How?", "Why?"),
        1,
    ),
    "MNLI": (
        "index|promptID|pairID|genre|sentence1_binary_parse|sentence2_binary_parse|sentence1_parse"
        "|sentence2_parse|sentence1|sentence2|label1|gold_label",
        "0|31193|31193n|fiction|( a )|( b )|(ROOT a)|(ROOT b)|It rains.|It pours.|neutral|neutral",
        ("It rains.", "It pours."),
        1,
    ),
    "QNLI": (
        "index|question|sentence|label",
        "0|When?|In 1539.|not_entailment",
        ("When?", "In 1539."),
        1,
    ),
    "RTE": (
        "index|sentence1|sentence2|label",
        "0|It is.|Is it?|entailment",
        ("It is.", "Is it?"),
        0,
    ),
    "WNLI": ("index|sentence1|sentence2|label", "0|He sat.|Bob sat.|0", ("He sat.", "Bob sat."), 0),
}


def write(folder, content, split="train", task="CoLA"):
    path = folder / task / f"{split}.tsv"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def read(folder, split="train", task="CoLA"):
    return examples.read_split(TASKS[task], str(folder), split).examples


@pytest.mark.parametrize("name", TASKS)
def test_every_task_is_read_in_the_benchmark_s_own_layout(tmp_path, name):
    header, row, texts, label = LAYOUTS[name]
    lines = "".join(f"{line}\n" for line in (header, row) if line).replace("|", "\t")
    task = TASKS[name]
    for split in ("train", *task.dev):
        write(tmp_path, lines, split, name)
        assert read(tmp_path, split, name) == [Example(texts, pytest.approx(label))]


@pytest.mark.parametrize("name", TASKS)
def test_test_sets_have_a_header_and_no_labels(tmp_path, name):
    task = TASKS[name]
    columns = ["index", *task.texts]
    texts = tuple(f"text {n}" for n in range(len(task.texts)))
    assert task.test
    for split in task.test:
        write(tmp_path, "\t".join(columns) + "\n0\t" + "\t".join(texts) + "\n", split, name)
        assert read(tmp_path, split, name) == [Example(texts)]
        write(tmp_path, "\t".join([*columns, task.label]) + "\n", split, name)
        with pytest.raises(ValueError, match=r"tsv: line 1: has labels, in column"):
            read(tmp_path, split, name)


def test_quotes_and_unusual_separators_are_part_of_a_sentence(tmp_path):
    sentence = '"Quoted" at \u2028 the start, and one " alone \x0b inside'
    write(tmp_path, f'a\t1\t\t{sentence}\nb\t0\t*\t"\n')
    assert [e.texts for e in read(tmp_path)] == [(sentence,), ('"',)]
    write(tmp_path, f'id\tquestion1\tquestion2\tis_duplicate\n0\t"{sentence}\t"\t1\n', task="QQP")
    assert read(tmp_path, task="QQP") == [Example((f'"{sentence}', '"'), 1)]


@pytest.mark.parametrize("ending", ["\n", "\r\n", ""])
def test_any_line_ending_and_a_byte_order_mark_are_accepted(tmp_path, ending):
    """A carriage return within a line is part of the text."""
    end = ending or "\n"
    write(tmp_path, f"\ufeffa\t1\t\tone \rx{end}b\t0\t*\ttwo{ending}")
    assert read(tmp_path) == [Example(("one \rx",), 1), Example(("two",), 0)]
    header = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String"
    write(tmp_path, f"\ufeff{header}{end}1\t7\t8\tone\ttwo{ending}", task="MRPC")
    assert read(tmp_path, task="MRPC") == [Example(("one", "two"), 1)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("a\t1\tno mark column", "3 tab-separated columns; accepted: 4"),
        ("a\t1\t\ttoo\tmany", "5 tab-separated columns; accepted: 4"),
        ("", "1 tab-separated columns; accepted: 4"),
        ("a\t2\t\tlabel", "label '2'; accepted: 0, 1"),
        ("a\t1\t\t ", "the text is empty"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    path = write(tmp_path, f"a\t1\t\tgood\n{line}\na\t1\t\tgood\n")
    with pytest.raises(ValueError, match="line 2") as caught:
        read(tmp_path)
    assert str(path) in str(caught.value)
    assert message in str(caught.value)


@pytest.mark.parametrize("score", ["5.1", "-0.1", "nan", "high", ""])
def test_a_score_out_of_range_is_named_with_its_line_below_the_header(tmp_path, score):
    write(tmp_path, f"sentence1\tsentence2\tscore\na\tb\t5.0\na\tb\t{score}\n", task="STS-B")
    with pytest.raises(ValueError, match=r"train\.tsv: line 3: label .* a number from 0 to 5"):
        read(tmp_path, task="STS-B")


def test_ragged_rows_are_counted_in_qqp_s_training_file_and_refused_elsewhere(tmp_path):
    rows = "id\tquestion1\tquestion2\tis_duplicate\n0\ta\tb\t1\n1\ta\t0\n2\ta\t\t0\n"
    for split in ("train", "dev"):
        write(tmp_path, rows, split, "QQP")
    found = examples.read_split(TASKS["QQP"], str(tmp_path), "train")
    assert found == examples.Split([Example(("a", "b"), 1), Example(("a", ""), 0)], skipped=1)
    with pytest.raises(ValueError, match=r"dev\.tsv: line 3: has 3 tab-separated columns"):
        read(tmp_path, "dev", "QQP")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ("index\tsentence1\tsentence2\tlabel\n", "is empty"),
        (b"index\tsentence1\t\xff\n", "is not UTF-8"),
        ("index\tpremise\tsentence2\tlabel\n0\ta\tb\tc\n", "line 1: has no column 'sentence1'"),
        ("index\tsentence1\tsentence2\n0\ta\tb\n", "line 1: has no column 'label'"),
    ],
)
def test_a_bad_file_is_named(tmp_path, content, message):
    write(tmp_path, content, "dev", "RTE")
    with pytest.raises(ValueError, match=message) as caught:
        read(tmp_path, "dev", "RTE")
    assert str(tmp_path) in str(caught.value)
    assert "RTE" in str(caught.value)


def test_a_missing_split_is_named(tmp_path):
    write(tmp_path, "a\t1\t\tgood\n", "train")
    with pytest.raises(ValueError, match=r"CoLA: has no dev\.tsv \(a saved dataset .*cola or"):
        read(tmp_path, "dev")


def test_a_saved_dataset_gives_the_same_examples_and_digest_as_tsv_files(tmp_path):
    import datasets

    rows = [("It rains.", "It pours.", 1), ("He ran.", "He sat.", 2), ("A dog.", "An animal.", 0)]
    names = TASKS["MNLI"].labels
    tsv = "sentence1\tsentence2\tgold_label\n"
    tsv += "".join(f"{a}\t{b}\t{names[label]}\n" for a, b, label in rows)
    columns = {
        "premise": [row[0] for row in rows],
        "hypothesis": [row[1] for row in rows],
        "label": [row[2] for row in rows],
    }
    splits = ("train", "validation_matched", "validation_mismatched")
    saved = datasets.DatasetDict({name: datasets.Dataset.from_dict(columns) for name in splits})
    unlabelled = {**columns, "label": [-1] * 3}
    saved["test_matched"] = datasets.Dataset.from_dict(unlabelled)
    saved.save_to_disk(tmp_path / "saved" / "mnli")
    task = TASKS["MNLI"]
    for split in ("train", *task.dev):
        write(tmp_path, tsv, split, "MNLI")
        both = [examples.read_split(task, str(tmp_path / place), split) for place in (".", "saved")]
        assert both[0] == both[1]
        assert examples.digest([both[0]]) == examples.digest([both[1]])
    assert read(tmp_path / "saved", "test_matched", "MNLI")[0] == Example(
        ("It rains.", "It pours.")
    )
    with pytest.raises(ValueError, match="no such split; it has train, validation_matched"):
        read(tmp_path / "saved", "test_mismatched", "MNLI")


def test_a_saved_dataset_without_the_task_s_columns_or_labels_is_refused(tmp_path):
    import datasets

    for labels, message in (
        ([2], "row 0: label 2; accepted: 0 to 1"),
        ([0, None], "row 1: label None; accepted: 0 to 1"),
        ([1, -1], "row 1: label -1; accepted: 0 to 1"),
        ([0.5], "row 0: label 0.5; accepted: 0 to 1"),
        ([], "has no column 'label'"),
    ):
        columns = {"sentence": ["a"] * max(1, len(labels)), **({"label": labels} if labels else {})}
        saved = datasets.DatasetDict({"train": datasets.Dataset.from_dict(columns)})
        saved.save_to_disk(tmp_path / str(labels) / "sst2")
        with pytest.raises(ValueError, match=message):
            read(tmp_path / str(labels), "train", "SST-2")


def test_the_digest_depends_on_every_split(tmp_path):
    digests = set()
    for train, dev in (("one", "two"), ("one", "three"), ("two", "two")):
        write(tmp_path, f"a\t1\t\t{train}\n", "train")
        write(tmp_path, f"a\t1\t\t{dev}\n", "dev")
        splits = [
            examples.read_split(TASKS["CoLA"], str(tmp_path), split) for split in ("train", "dev")
        ]
        digests.add(examples.digest(splits))
    assert len(digests) == 3


@pytest.mark.parametrize(
    ("name", "train", "dev"),
    [
        ("CoLA", 8551, 1043),
        ("MRPC", 3668, 408),
        ("RTE", 2490, 277),
        ("STS-B", 5749, 1500),
        ("WNLI", 635, 71),
        ("QNLI", None, 5463),
        ("SST-2", 67349, 872),
    ],
)
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
                is_constant = 1 - score / value < LEAST_EXPLAINED
            assert cell.endswith("*") == is_constant


@pytest.mark.parametrize("name", ["CoLA", "MRPC", "RTE", "STS-B", "WNLI", "QNLI"])
def test_real_test_sets_are_read(real_glue, name):
    assert len(read(real_glue, "test", name)) > 100


@pytest.mark.parametrize("name", ["MNLI", "QQP"])
def test_real_rows_of_mnli_and_qqp_are_read_by_their_headers(real_glue, tmp_path, name):
    content = (real_glue / name / "train_subset.tsv").read_bytes()
    write(tmp_path, content, task=name)
    assert len(read(tmp_path, task=name)) == 8999
