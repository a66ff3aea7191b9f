import json
import unicodedata

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep import contamination
from data_prep.__main__ import main
from data_prep.contamination import contaminated, digests, find_files, texts_of, write_ngrams
from data_prep.documents import Document
from data_prep.inspect import describe
from data_prep.manifest import Settings
from data_prep.run import prepare
from data_prep.summary import broken_warning
from data_prep.task import ShardTask
from data_prep.verify import verify
from tests.data_prep.conftest import make_texts, write_pile

TEST = "of all the cats that ever lived in this old house none was as quiet as hers"


def task_of(folder, files, size=13):
    chosen = Settings(decontaminate=digests(files, size), decontaminate_ngram=size)
    return ShardTask(0, folder, folder, chosen, "")


def reasons_of(folder, files, size, texts):
    """Return the reason for each text."""
    task = task_of(folder, files, size)
    write_ngrams([task])
    judge = contaminated(task)
    return [judge(number, Document(text, "X", "a", 1)) for number, text in enumerate(texts)]


def contains(text, run):
    return any(text[i : i + len(run)] == run for i in range(len(text) - len(run) + 1))


WORDS = st.lists(st.sampled_from(["a", "b", "c"]), min_size=0, max_size=14)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(WORDS, min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(WORDS, min_size=1, max_size=5),
    st.sampled_from([1, 4, 8, 9, 11]),
)
def test_verdicts_are_those_of_a_search(tmp_path_factory, tests, documents, size):
    folder = tmp_path_factory.mktemp("contamination")
    files = []
    for number, texts in enumerate(tests):
        file = folder / f"{number}.txt"
        texts = [*texts, [f"w{n}" for n in range(12)]]  # so that there is one that is long enough
        file.write_text("\n".join(map(" ".join, texts)))
        files.append(file)
    found = reasons_of(folder, files, size, list(map(" ".join, documents)))
    for document, reason in zip(documents, found, strict=True):
        named = []
        for number, texts in enumerate(tests):
            looked_for = [
                text[i : i + size]
                for text in texts
                if len(text) >= min(size, 8)
                for i in range(max(len(text) - size, 0) + 1)
            ]
            if any(contains(document, run) for run in looked_for):
                named.append(f"contaminated:{folder.name}/{number}.txt")
        assert reason == next(iter(named), None)


@pytest.mark.parametrize("offset", [0, 1000, 16_380, 100_000])
def test_an_ngram_is_found_anywhere_whatever_its_case_and_punctuation(tmp_path, offset):
    file = tmp_path / "test.txt"
    file.write_text(TEST)
    filler = "-" * (offset % 7) + "word " * (offset // 5)
    thirteen, twelve = TEST.split()[2:15], TEST.split()[2:14]
    texts = [
        f"{filler}{' '.join(thirteen).upper()} {filler}",
        f"{filler}“{', '.join(thirteen)}”",
        f"{filler}{' '.join(twelve)} {filler}",
    ]
    reason = f"contaminated:{tmp_path.name}/test.txt"
    assert reasons_of(tmp_path, [file], 13, texts) == [reason, reason, None]


def test_an_ngram_is_found_however_its_accents_and_spaces_are_written(tmp_path):
    french = "Le préfet a été étonné que l’élève ait préféré à la forêt son siège près du château"
    chinese = "中国的首都是北京，它是一座历史悠久的城市"
    file = tmp_path / "test.txt"
    file.write_text(f"{french}\n{chinese}")
    texts = [
        unicodedata.normalize("NFD", french).upper(),
        french.replace(" ", "\u3000").replace("’", "＇"),
        " ".join(chinese),
        chinese.replace("，", "\u2003、"),
        chinese[:12],
    ]
    reason = f"contaminated:{tmp_path.name}/test.txt"
    assert reasons_of(tmp_path, [file], 13, texts) == [*[reason] * 4, None]


@pytest.mark.parametrize("first", [0x3040, 0x4E00])
def test_every_text_of_a_script_without_spaces_is_found_and_none_across_two(tmp_path, first):
    """Kana and Chinese; the texts are hashed together, in pieces."""
    file = tmp_path / "test.txt"
    numbers = np.random.default_rng(0).integers(0, 60, (2000, 20))
    texts = ["".join(chr(first + number) for number in row) for row in numbers]
    file.write_text("\n".join(texts))
    filler = "".join(chr(0x9000 + number) for number in range(3000)) * 2
    documents = [f"{filler}{text}{filler}" if n % 100 else text for n, text in enumerate(texts)]
    reason = f"contaminated:{tmp_path.name}/test.txt"
    found = reasons_of(tmp_path, [file], 13, documents)
    assert [n for n, each in enumerate(found) if each != reason] == []
    across = [one[-7:] + other[:7] for one, other in zip(texts, texts[1:], strict=False)]
    assert set(reasons_of(tmp_path, [file], 13, across)) == {None}


def test_texts_are_cells_of_lines_or_strings_of_json(tmp_path):
    tsv = tmp_path / "dev.tsv"
    tsv.write_text('\ufeffid\tsentence\n1\tit "is\n\n2\té\u2028f\r\n')
    assert [text.strip() for text in texts_of(tsv)] == [
        *("id", "sentence", "1", 'it "is', "2", "é\u2028f"),
    ]
    packed = tmp_path / "dev.jsonl.zst"
    lines = [{"a": "one", "b": ["two", {"c": "three", "d": 4}]}, "four", None]
    packed.write_bytes(zstandard.compress("\n\n".join(map(json.dumps, lines)).encode()))
    assert list(texts_of(packed)) == ["one", "two", "three", "four"]


@pytest.mark.parametrize("depth", [500, 1000, 100_000])
def test_deeply_nested_json_is_read_or_refused(tmp_path, depth):
    file = tmp_path / "test.jsonl"
    file.write_text("[" * depth + '"a", ["b"], {"c": "d"}' + "]" * depth)
    if depth < 100_000:
        assert list(texts_of(file)) == ["a", "b", "d"]
    else:
        with pytest.raises(ValueError, match=f"{file}: line 1: nested-too-deeply"):
            list(texts_of(file))


def test_a_folder_stands_for_the_sets_of_glue_that_are_not_for_training(tmp_path):
    kept = ("CoLA/dev.tsv", "MNLI/dev_matched.tsv", "MNLI/test_mismatched.tsv", "AX/AX.tsv")
    others = ("CoLA/train.tsv", "MRPC/dev_ids.tsv", "MRPC/msr_paraphrase_test.txt")
    for name in (*kept, *others):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    expected = sorted(tmp_path / name for name in kept)
    assert find_files([str(tmp_path)]) == expected
    assert find_files([f"{tmp_path}/*", str(tmp_path / "CoLA")]) == expected
    assert find_files([str(tmp_path / others[-1])]) == [tmp_path / others[-1]]
    with pytest.raises(ValueError, match=r"--decontaminate .*nothing: no such file"):
        find_files([str(tmp_path / "nothing")])


@pytest.mark.parametrize(
    ("name", "written", "message"),
    [
        ("a.txt", b"", "is empty"),
        ("a.txt", b"one line\n\xff\n", "line 2: not UTF-8"),
        ("a.tsv", TEST.encode() + b"\n\xe4\n", "line 2: not UTF-8"),
        ("a.jsonl", b'"one"\n{', "line 2: not-json"),
        ("a.jsonl", b'"\xff"', "line 1: bad-utf8"),
        ("a.txt", b"one two three four five six seven\n", "no text of 8 or more words"),
        ("a.txt.gz", TEST.encode(), "not gzip as its name says"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_before_any_work(
    inputs, tokenizer_folder, tmp_path, capsys, name, written, message
):
    file = tmp_path / name
    file.write_bytes(written)
    arguments = ["prepare", "--input", str(inputs[0]), "--tokenizer", str(tokenizer_folder)]
    arguments += ["--output", str(tmp_path / "corpus"), "--decontaminate", str(file)]
    assert main(arguments) == 2
    errors = capsys.readouterr().err
    assert str(file) in errors
    assert message in errors
    assert not (tmp_path / "corpus").exists()


@pytest.mark.usefixtures("in_process")
def test_drops_are_counted_by_file(tokenizer_folder, tmp_path):
    glue = tmp_path / "glue"
    for task, text in (("RTE", TEST), ("CoLA", "the sailors rode the breeze clear of the rocks")):
        (glue / task).mkdir(parents=True)
        (glue / task / "dev.tsv").write_text(f"id\tsentence\n1\t{text}\n2\tshort\n")
    texts = [
        f"So {TEST}.",
        TEST,
        "they say the sailors rode the breeze clear of the rocks",
        "short",
    ]
    source = write_pile(tmp_path / "a.jsonl.zst", [*make_texts(10, 30), *texts])
    chosen = Settings(decontaminate=digests(find_files([str(glue)]), 13))
    folder = tmp_path / "corpus"
    manifest = prepare([source], folder, tokenizer_folder, chosen)
    counts = {reason: rejects.count for reason, rejects in manifest.rejects.items()}
    assert counts == {"contaminated:RTE/dev.tsv": 2, "contaminated:CoLA/dev.tsv": 1}
    assert manifest.rejects["contaminated:CoLA/dev.tsv"].places == [f"{source}:13"]
    assert broken_warning(manifest) is None
    shown = [*describe(folder, 0)]
    assert any(line.startswith("rejected: contaminated:RTE/dev.tsv 2") for line in shown)

    record = json.loads((folder / "manifest.json").read_text())
    record["rejects"]["contaminated:RTE/dev.tsv"]["by_subset"]["Pile-CC"] = 1
    (folder / "manifest.json").write_text(json.dumps(record))
    (problem,) = verify(folder)
    assert "1 documents rejected as contaminated:RTE/dev.tsv, but its shards have 2" in problem


@pytest.mark.usefixtures("in_process")
def test_all_documents_dropped_is_an_error_with_the_reasons(tokenizer_folder, tmp_path):
    file = tmp_path / "test.txt"
    file.write_text(TEST)
    source = write_pile(tmp_path / "a.jsonl.zst", [TEST, f"{TEST} twice"])
    chosen = Settings(decontaminate=digests([file], 13))
    with pytest.raises(ValueError, match=r"kept: 2 contaminated:.*test\.txt \(first at"):
        prepare([source], tmp_path / "corpus", tokenizer_folder, chosen)


@pytest.mark.usefixtures("in_process")
def test_a_test_set_that_changed_is_refused(tokenizer_folder, tmp_path):
    file = tmp_path / "test.txt"
    file.write_text(TEST)
    source = write_pile(tmp_path / "a.jsonl.zst", make_texts(5, 20))
    chosen, corpus = Settings(decontaminate=digests([file], 13)), tmp_path / "corpus"
    prepare([source], corpus, tokenizer_folder, chosen)
    file.write_text(f"{TEST} indeed")
    changed = Settings(decontaminate=digests([file], 13))
    with pytest.raises(ValueError, match="decontaminate was .* and is "):
        prepare([source], corpus, tokenizer_folder, changed)
    with pytest.raises(ValueError, match=r"test\.txt: changed since the start"):
        prepare([source], corpus, tokenizer_folder, chosen, overwrite=True)


def test_batches_of_texts_do_not_change_the_ngrams(tmp_path, monkeypatch):
    file = tmp_path / "test.txt"
    numbers = np.random.default_rng(0).integers(0, 9, (40, 20))
    file.write_text(
        "\n".join(" ".join(map(str, row[: 5 + n % 16])) for n, row in enumerate(numbers))
    )
    task = task_of(tmp_path, [file])
    write_ngrams([task])
    written = tmp_path / "shards" / "contamination.ngrams"
    whole = written.read_bytes()
    written.unlink()
    monkeypatch.setattr(contamination, "_TEXTS", 7)
    write_ngrams([task])
    assert written.read_bytes() == whole
