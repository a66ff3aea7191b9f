"""The text of the task: what is read, its vocabulary, and the corpus made of it."""

import pytest

from data_prep.manifest import load_manifest
from data_prep.tokenizer import load
from finetune.birthplaces import corpus


def write(path, content):
    path.write_bytes(content)
    return path


def vocabulary(path):
    return corpus.vocabulary(corpus.documents(path))


def test_a_line_is_a_document_and_blank_lines_are_none(tmp_path):
    path = write(tmp_path / "a.txt", "Ann was born.\n\n  \n\u00a0\nBob too.\n".encode())
    assert corpus.documents(path) == ["Ann was born.", "Bob too."]


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "has no text"), (b"\n \n", "has no text"), (b"a\n\xff\n", "line 2: bad-utf8")],
)
def test_a_file_without_text_or_with_other_bytes_is_refused(tmp_path, content, message):
    with pytest.raises(ValueError, match=rf"a.txt: {message}"):
        corpus.documents(write(tmp_path / "a.txt", content))


def test_a_text_of_other_characters_than_the_models_is_refused(tmp_path):
    path, same, other = (
        write(tmp_path / name, content)
        for name, content in (("a.txt", b"xyz"), ("b.txt", b"zyx"), ("c.txt", b"vxyz"))
    )
    corpus.refuse_other_vocabulary(tmp_path, vocabulary(same), path)
    with pytest.raises(ValueError, match=r"ids is not that of .* \(only one has 'v'"):
        corpus.refuse_other_vocabulary(tmp_path, vocabulary(other), path)


def test_every_question_about_a_person_of_the_text_can_be_asked(tmp_path):
    tokenizer = corpus.vocabulary(["Bo lives."])
    (ids,) = tokenizer.encode_batch([corpus.QUESTION.format("Bo")])
    assert tokenizer.unk_id not in ids


def test_a_corpus_is_made_once_for_each_text(tmp_path):
    texts = ["Ann was born.", "Bob too."]
    folder = corpus.folder_of("a", texts, tmp_path)
    prepared = corpus.prepare(texts, folder)
    assert prepared.is_relative_to(folder)
    assert load(prepared).digest() == corpus.vocabulary(texts).digest()
    assert load_manifest(prepared).totals["train"].documents == 2
    before = (prepared / "manifest.json").stat().st_mtime_ns
    assert corpus.prepare(texts, folder) == prepared
    assert (prepared / "manifest.json").stat().st_mtime_ns == before
    assert corpus.folder_of("a", texts[:1], tmp_path) != folder
