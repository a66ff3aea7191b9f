"""The acceptability task: only the order of arguments tells the classes apart."""

import json
import random

import pytest
import zstandard

from finetune import acceptability, benchmarks, examples
from finetune.__main__ import main

COLA = benchmarks.find("CoLA")
SUBJECTS = ("The reader", "Each writer", "Some object", "This method")
WORDS = ["returns", "every", "value", "that", "the", "caller", "has", "given", "before", "it", "a"]


def make_sentences(count, seed):
    draw = random.Random(seed)
    return [
        f"{draw.choice(SUBJECTS)} {' '.join(draw.sample(WORDS, 9))} number{seed}x{number}."
        for number in range(count)
    ]


def write_source(path, texts):
    lines = "".join(json.dumps({"text": text, "meta": {}}) + "\n" for text in texts)
    path.write_bytes(zstandard.compress(lines.encode()))
    return path


@pytest.fixture
def source(tmp_path):
    """Forty documents of five sentences."""
    texts = [" ".join(make_sentences(5, seed)) for seed in range(40)]
    return write_source(tmp_path / "held-out.jsonl.zst", texts)


def rows_of(content):
    return [line.split("\t") for line in content.removesuffix("\n").split("\n")]


def test_every_sentence_is_in_both_classes_and_no_document_in_both_splits(source):
    files = acceptability.make(acceptability.find([source]), train=100, dev=40, seed=1)
    train, dev = rows_of(files["train"]), rows_of(files["dev"])
    for rows, count in ((train, 100), (dev, 40)):
        assert [row[1:3] for row in rows] == [["1", ""], ["0", "*"]] * count
        intact, scrambled = ({row[3] for row in rows if row[1] == label} for label in "10")
        assert len(intact) == count
        assert not intact & scrambled
    assert not {row[0] for row in train} & {row[0] for row in dev}


def test_a_scrambled_sentence_differs_in_word_order_only(source):
    files = acceptability.make(acceptability.find([source]), train=100, dev=40, seed=1)
    rows = rows_of(files["train"] + files["dev"])
    assert len(rows) == 2 * (100 + 40)
    for intact, scrambled in zip(rows[::2], rows[1::2], strict=True):
        old, new = intact[3].split(" "), scrambled[3].split(" ")
        assert sorted(old) == sorted(new)
        moved = [index for index, word in enumerate(old) if new[index] != word]
        assert 0 < moved[0] <= moved[-1] < len(old) - 1
        assert all(old[index].islower() and old[index].isalpha() for index in moved)


def test_the_files_depend_on_the_seed_only(source):
    documents = acceptability.find([source])
    first, again = (acceptability.make(documents, train=60, dev=20, seed=1) for _ in range(2))
    assert first == again
    assert first != acceptability.make(documents, train=60, dev=20, seed=2)


@pytest.mark.parametrize(
    "text",
    [
        "Too short to be taken.",
        "no capital letter at the start of this sentence here.",
        "A sentence without its end that goes on and on",
        "x = compute(a, b) + c; The result of A B C D E F.",
        "The old the old the old the old.",
        "Every word, every one, has, some, punctuation, beside, it, here.",
    ],
)
def test_sentences_that_are_not_prose_or_cannot_be_scrambled_are_left_out(tmp_path, text):
    assert acceptability.find([write_source(tmp_path / "a.jsonl.zst", [text])]) == []


def test_a_repeated_sentence_counts_once(tmp_path):
    sentence = make_sentences(1, 0)[0]
    texts = [f"{sentence} {sentence}", f"Heading\n\n{sentence.upper()}\n\n{sentence}"]
    (document,) = acceptability.find([write_source(tmp_path / "a.jsonl.zst", texts)])
    assert document == acceptability.Sentences("a.jsonl.zst:1", (sentence,))


def test_line_breaks_within_a_paragraph_do_not_end_a_sentence(tmp_path):
    sentence = make_sentences(1, 0)[0]
    (document,) = acceptability.find(
        [write_source(tmp_path / "a.jsonl.zst", [sentence.replace(" ", "\n   ", 3)])]
    )
    assert document.sentences == (sentence,)


def test_excluded_sentences_are_left_out(tmp_path, source):
    seen = make_sentences(5, 3)
    other = write_source(tmp_path / "seen.jsonl.zst", ["Before it. " + " ".join(seen[:2])])
    kept = {s for d in acceptability.find([source], [other]) for s in d.sentences}
    assert len(kept) == 198
    assert not kept & set(seen[:2])


def test_the_command_writes_what_the_task_reads(tmp_path, source, capsys):
    arguments = ["acceptability", "--input", str(source), "--output", str(tmp_path / "glue")]
    assert main([*arguments, "--train", "60", "--dev", "20"]) == 0
    splits = [
        examples.read_split(COLA, str(tmp_path / "glue"), split) for split in ("train", "dev")
    ]
    assert [len(split.examples) for split in splits] == [120, 40]
    provenance = json.loads((tmp_path / "glue" / "CoLA" / "provenance.json").read_text())
    assert provenance["train"] == 60
    assert "200 sentences in 40 documents" in capsys.readouterr().out


@pytest.mark.parametrize("split", ["train", "dev", "test"])
def test_files_that_the_command_did_not_write_are_not_replaced(tmp_path, source, capsys, split):
    """Regression test: --output GLUE replaced the benchmark's CoLA."""
    file = tmp_path / "glue" / "CoLA" / f"{split}.tsv"
    file.parent.mkdir(parents=True)
    file.write_text("gj04\t1\t\tHe left.\n")
    arguments = ["acceptability", "--input", str(source), "--output", str(tmp_path / "glue")]
    assert main([*arguments, "--train", "60", "--dev", "20"]) == 2
    error = capsys.readouterr().err
    assert f"{file}: was not written by acceptability" in error
    assert error.count("\n") == 1
    assert [path.read_text() for path in file.parent.iterdir()] == ["gj04\t1\t\tHe left.\n"]


def test_files_of_the_command_are_replaced_even_if_it_was_interrupted(
    tmp_path, source, monkeypatch
):
    arguments = ["acceptability", "--input", str(source), "--output", str(tmp_path / "glue")]
    arguments += ["--train", "60"]

    def interrupted(path, content):
        write(path, content)
        raise KeyboardInterrupt

    write = acceptability.write_atomically
    with monkeypatch.context() as patched:
        patched.setattr(acceptability, "write_atomically", interrupted)
        assert main([*arguments, "--dev", "20"]) == 130
    for dev in (20, 30):
        assert main([*arguments, "--dev", str(dev)]) == 0
        assert len(examples.read_split(COLA, str(tmp_path / "glue"), "dev").examples) == 2 * dev


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--train", "190", "--dev", "20"], "200 sentences are too few for --train 190"),
        (["--train", "0"], "--train 0: accepted: 1 or more"),
        (["--exclude", "nothing*"], "nothing*: no such file"),
    ],
)
def test_bad_requests_are_refused_in_one_line(tmp_path, source, capsys, arguments, message):
    output = tmp_path / "glue"
    code = main(["acceptability", "--input", str(source), "--output", str(output), *arguments])
    error = capsys.readouterr().err
    assert code == 2
    assert message in error
    assert error.count("\n") == 1
    assert not output.exists()
