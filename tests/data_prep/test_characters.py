import pytest

from data_prep.tokenizer import train_characters


def test_special_tokens_come_first_and_characters_are_sorted_by_code_point():
    vocabulary = train_characters(["born in Ōsaka", "\n<s>", "𝔄🙂é"])
    characters = sorted(set("born in Ōsaka\n<s>𝔄🙂é"))
    expected = ["<s>", "<pad>", "</s>", "<unk>", *characters, "<mask>"]
    assert [vocabulary.token_text(id) for id in range(vocabulary.vocab_size)] == expected


def test_each_character_has_an_id_and_unknown_ones_become_unk():
    vocabulary = train_characters(iter(["abc <s>/\n🙂"]))
    texts = ["cab\n🙂", "abcdéf a", "<s></s><mask>", "", "a" * 10_000, "  "]
    for text, ids in zip(texts, vocabulary.encode_batch(texts), strict=True):
        assert len(ids) == len(text)
        known = "".join(c if c in "abc <s>/\n🙂" else "<unk>" for c in text)
        assert vocabulary.decode(ids.tolist()) == known


def test_texts_without_characters_are_refused():
    with pytest.raises(ValueError, match="the texts have no characters"):
        train_characters(["", ""])
