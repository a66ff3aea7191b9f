import os
import pickle
from pathlib import Path

import pytest

from data_prep.tokenizer import load, train_characters


def test_special_tokens_come_first_and_characters_are_sorted_by_code_point():
    vocabulary = train_characters(["born in Ōsaka", "\n<s>", "𝔄🙂é"])
    characters = sorted(set("born in Ōsaka\n<s>𝔄🙂é"))
    expected = ["<s>", "<pad>", "</s>", "<unk>", *characters, "<mask>"]
    assert [vocabulary.token_text(id) for id in range(vocabulary.vocab_size)] == expected


def test_each_character_has_an_id_and_unknown_ones_become_unk(tmp_path):
    vocabulary = train_characters(iter(["abc <s>/\n🙂"]))
    texts = ["cab\n🙂", "abcdéf a", "<s></s><mask>", "", "a" * 10_000, "  "]
    for text, ids in zip(texts, vocabulary.encode_batch(texts), strict=True):
        assert len(ids) == len(text)
        known = "".join(c if c in "abc <s>/\n🙂" else "<unk>" for c in text)
        assert vocabulary.decode(ids.tolist()) == known
    vocabulary.save(tmp_path / "tokenizer.json")
    same = load(tmp_path)
    assert same.digest() == pickle.loads(pickle.dumps(vocabulary)).digest() == vocabulary.digest()
    assert [i.tolist() for i in same.encode_batch(texts)] == [
        i.tolist() for i in vocabulary.encode_batch(texts)
    ]


def test_texts_without_characters_are_refused():
    with pytest.raises(ValueError, match="the texts have no characters"):
        train_characters(["", ""])


def test_characters_of_the_birthplaces_text_decode_to_the_same_text():
    shared = os.environ.get("ZEROCLAP_SHARED")
    if not shared:
        pytest.skip("ZEROCLAP_SHARED does not name the folder with the birthplaces")
    text = (Path(shared) / "data" / "birthplaces" / "wiki.txt").read_text(encoding="utf-8")
    vocabulary = train_characters([text])
    (ids,) = vocabulary.encode_batch([text[:50_000]])
    assert vocabulary.decode(ids.tolist()) == text[:50_000]
    assert vocabulary.vocab_size == len(set(text)) + 5
