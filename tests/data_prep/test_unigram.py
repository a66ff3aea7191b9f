"""Unigram vocabularies: training, white space, bytes, and ALBERT's file."""

import json

import pytest
import tokenizers
from tokenizers.pre_tokenizers import WhitespaceSplit

from data_prep import unigram
from data_prep.tokenizer import Tokenizer, load, load_with_order
from pretrain.objectives.masked import word_starts_of
from tests.data_prep.conftest import make_texts
from tests.data_prep.test_encoders import random_texts
from tests.running import python

CONTROL_TEXT = "<s> </s><pad><mask> <unk> [CLS][SEP]<0x41>"
TEXTS = [*make_texts(300, 40), "Naïve Café, “quoted” (1990s) don't; x² = 3.14!"]
SIZE = 600
TRAIN_AGAIN = """
from tests.data_prep.test_unigram import train_again
print(train_again().digest(), train_again(lowercase=True).digest())
"""


def train_again(*, lowercase=False):
    return Tokenizer(unigram.train(iter(TEXTS), SIZE, lowercase=lowercase))


@pytest.fixture(scope="module")
def vocabulary():
    return train_again()


def pieces_of(tokenizer, text):
    return [tokenizer.token_text(id) for id in tokenizer.encode_batch([text])[0]]


def test_text_keeps_all_its_words_and_has_no_special_ids(vocabulary):
    normalize = unigram._normalizer(lowercase=False).normalize_str
    texts = [*random_texts(200), *TEXTS, CONTROL_TEXT, "漢字 \U0001f600", " two\n\n lines ", ""]
    for text, ids in zip(texts, vocabulary.encode_batch(texts), strict=True):
        # Words between white space as Unicode defines it; str.split knows four more.
        words = WhitespaceSplit().pre_tokenize_str(normalize(text.replace("▁", " ")))
        assert vocabulary.decode(ids.tolist()) == "".join(f" {word}" for word, _ in words)
        assert not set(ids.tolist()) & {0, 1, 2, 3, vocabulary.mask_id}


def test_frequent_words_are_pieces_even_if_no_longer_word_begins_with_them(vocabulary):
    """The library's trainer alone would split them."""
    text = "the model reads a document"
    assert pieces_of(vocabulary, text) == [" the", " model", " reads", " a", " document"]


def test_lowercase_removes_accents_and_keeps_korean_syllables():
    tokenizer = train_again(lowercase=True)
    [ids] = tokenizer.encode_batch(["Naïve CAFÉ 한국어 x²"])
    assert tokenizer.decode(ids.tolist()) == " naive cafe 한국어 x2"


def test_pieces_do_not_mix_letters_with_digits_or_punctuation(vocabulary):
    for id in range(4 + 256, vocabulary.mask_id):
        text = vocabulary.token_text(id).strip()
        kinds = {(c.isalpha(), c.isnumeric()) for c in text}
        assert len(kinds) <= 1, text


def test_training_is_deterministic_in_a_process_with_more_threads(vocabulary):
    variables = {"RAYON_NUM_THREADS": "2", "TOKENIZERS_PARALLELISM": "true"}
    printed = python("-c", TRAIN_AGAIN, **variables)
    assert printed.split() == [vocabulary.digest(), train_again(lowercase=True).digest()]


def test_characters_that_the_trainer_drops_and_adds_again_have_the_same_scores_each_time():
    """It adds them in the order of a table with random keys."""
    texts = ["[one] (two) {three}"] * 9
    assert len({unigram.train(texts, 330).to_str() for _ in range(8)}) == 1


def test_rare_characters_have_no_piece_and_are_encoded_as_bytes():
    texts = ["abc " * 10_000 + "ж"]
    tokenizer = Tokenizer(unigram.train(texts, 300))
    [ids] = tokenizer.encode_batch(["ж"])
    assert ids.tolist()[1:] == [4 + byte for byte in "ж".encode()]
    assert tokenizer.decode(ids.tolist()) == " ж"


def test_too_small_a_vocabulary_and_texts_without_characters_are_refused():
    with pytest.raises(ValueError, match=r"vocabulary size 264: accepted: 265 or more"):
        unigram.train(["ab"], 264)
    assert unigram.train(["ab"], 265).get_vocab_size() == 264
    for texts in ([], ["", " \n"]):
        with pytest.raises(ValueError, match="the texts have no characters"):
            unigram.train(texts, 600)


def test_digest_depends_on_pieces_and_scores(vocabulary, tmp_path):
    digests = {vocabulary.digest()}
    for column, more in enumerate(("x", -0.5)):
        content = vocabulary.content()
        content["model"]["vocab"][300][column] += more
        (tmp_path / "tokenizer.json").write_text(json.dumps(content))
        digests.add(load(tmp_path).digest())
    assert len(digests) == 3


def test_words_start_where_white_space_ends_and_at_what_is_no_letter(vocabulary):
    starts = word_starts_of(vocabulary)
    for text in (" ".join(TEXTS), "don't 漢字 3.14 \n x", CONTROL_TEXT):
        letters = "".join(each for each in text if each.isalpha() or each.isspace())
        [ids] = vocabulary.encode_batch([letters])
        assert starts[ids].sum() == len(letters.split())
        assert starts[ids[0]]
    [ids] = vocabulary.encode_batch(["the model,3"])
    assert starts[ids].sum() == 4


# ALBERT's tokenizer.json


@pytest.fixture(scope="module")
def albert(vocabulary, tmp_path_factory):
    """Write the files of an ALBERT tokenizer, with pieces in its order, and return the folder."""
    transformers = pytest.importorskip("transformers")
    words = [(piece, score) for piece, score in vocabulary.content()["model"]["vocab"][260:]]
    special = [("<pad>", 0.0), ("<unk>", 0.0), ("[CLS]", 0.0), ("[SEP]", 0.0), ("[MASK]", 0.0)]
    # Published ones have eight symbols of score 0 after the special tokens.
    symbols = [("(", 0.0), ('"', 0.0), ("£", 0.0)]
    others = [(piece, score) for piece, score in words if piece not in dict(symbols)]
    folder = tmp_path_factory.mktemp("albert")
    transformers.AlbertTokenizer(vocab=[*special, *symbols, *others]).save_pretrained(folder)
    return folder


def test_alberts_ids_correspond_one_to_one(albert):
    ours, order = load_with_order(albert)
    theirs = tokenizers.Tokenizer.from_file(str(albert / "tokenizer.json"))
    assert sorted(order) == list(range(theirs.get_vocab_size()))
    special = [theirs.id_to_token(order[id]) for id in (0, 1, 2, 3, ours.mask_id)]
    assert special == ["[CLS]", "<pad>", "[SEP]", "<unk>", "[MASK]"]
    texts = [*TEXTS, *random_texts(200), "``Quoted'' Naïve £5 (sic)  漢字\n", ""]
    for text, ids in zip(texts, ours.encode_batch(texts), strict=True):
        assert [order[id] for id in ids] == theirs.encode(text, add_special_tokens=False).ids
    [first, second] = ours.encode_batch(["the model", "a document"])
    assert [order[id] for id in [0, *first, 2, *second, 2]] == (
        theirs.encode("the model", "a document").ids
    )


def test_alberts_file_is_loaded_as_any_other(albert, tmp_path):
    ours = load(albert)
    ours.save(tmp_path / "tokenizer.json")
    assert load(tmp_path).digest() == ours.digest()
    assert pieces_of(load(tmp_path), "漢字") == [" ", "<unk>"]
    [ids] = ours.encode_batch([CONTROL_TEXT])
    assert not set(ids.tolist()) & {0, 1, 2, ours.mask_id}


@pytest.mark.parametrize("has_bytes", [False, True])
def test_characters_without_a_piece_are_bytes_where_the_file_says_so(
    vocabulary, has_bytes, tmp_path
):
    content = vocabulary.content()
    content["model"]["byte_fallback"] = has_bytes
    content["added_tokens"].reverse()
    text = json.dumps(content).replace("</s>", "[SEP]")
    text = text.replace("<s>", "[CLS]").replace("<mask>", "[MASK]")
    (tmp_path / "tokenizer.json").write_text(text)
    assert pieces_of(load(tmp_path), "漢") == [" ", *(["�"] * 3 if has_bytes else ["<unk>"])]


def test_other_files_than_alberts_are_refused(albert, tmp_path):
    content = json.loads((albert / "tokenizer.json").read_text())
    content["added_tokens"] = []
    content["model"]["vocab"][4][0] = "[OTHER]"
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"lacks \[MASK\]"):
        load(tmp_path)
    backend = tokenizers.Tokenizer.from_file(str(albert / "tokenizer.json"))
    backend.add_tokens(["one more"])
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="has 1 added tokens"):
        load(tmp_path)
