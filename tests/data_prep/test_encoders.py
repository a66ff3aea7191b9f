"""The encoder gives the ids of the reference, or uses the reference."""

import sys

import numpy as np
import pytest
import tokenizers
from tokenizers import pre_tokenizers

from data_prep import encoders
from data_prep.encoders import DIFFICULT_TEXTS, Encoder
from data_prep.tokenizer import Tokenizer, _bpe, train
from tests.data_prep.conftest import make_texts

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
FAST = "gigatoken 0.10.0"


@pytest.fixture(autouse=True)
def _warnings_are_repeated():
    yield
    encoders._say.cache_clear()


def random_texts(count, seed=0):
    """Return texts from all planes of Unicode, with spaces, digits, apostrophes and runs."""
    generator = np.random.default_rng(seed)
    texts = []
    for _ in range(count):
        limits = generator.choice([0x80, 0x250, 0x3000, 0xD800, 0x110000], size=40)
        points = (generator.random(40) * limits).astype(int)
        characters = [chr(point) for point in points if not 0xD800 <= point < 0xE000]
        characters += generator.choice(list("  \n\t'sta1.\u2019"), size=40).tolist()
        generator.shuffle(characters)
        repeats = generator.choice([1, 1, 1, 2, 17], size=len(characters))
        texts.append("".join(c * n for c, n in zip(characters, repeats, strict=True)))
    return texts


def random_merges(seed, count=60):
    """Return unordered ids, tokens made by several merges, and merges that precede their parts."""
    generator = np.random.default_rng(seed)
    tokens, merges = list("abc\u0120"), dict[tuple[str, str], None]()
    for left, right in (generator.choice(tokens, 2).tolist() for _ in range(count)):
        if len(left + right) <= 8:
            merges[left, right] = None
            tokens = [*dict.fromkeys([*tokens, left + right])]
    for _ in range(count):
        left, right = generator.choice(tokens, 2).tolist()
        if left + right in tokens:
            merges[left, right] = None
    ordered = list(merges)
    if seed % 2:
        generator.shuffle(ordered)
    ids = generator.permutation([*ALPHABET, *(t for t in tokens if len(t) > 1)]).tolist()
    named = ["<s>", "<pad>", "</s>", "<unk>", "madeupword0000", *ids, "<mask>"]
    pairs = [(str(left), str(right)) for left, right in ordered]
    return Tokenizer(_bpe({token: id for id, token in enumerate(named)}, pairs))


def assert_same_ids(encoder, tokenizer, texts):
    found, expected = encoder.encode(texts), tokenizer.encode_batch(texts)
    assert len(found) == len(texts)
    for text, ids, right in zip(texts, found, expected, strict=True):
        assert ids.dtype == np.int32
        assert np.array_equal(ids, right), text[:200]


@pytest.mark.parametrize("size", [300, 700, 5000])
def test_ids_are_those_of_the_reference_for_trained_vocabularies(size):
    # Enough text for the merges of a large vocabulary.
    texts = random_texts(size // 20, seed=size) + make_texts(50, 40)
    tokenizer = train(iter(texts), size)
    encoder = Encoder(tokenizer)
    assert_same_ids(encoder, tokenizer, [*DIFFICULT_TEXTS, *random_texts(200), *make_texts(20, 60)])
    assert encoder.name == FAST


@pytest.mark.parametrize("seed", range(8))
def test_merges_apply_in_their_own_order_whatever_the_ids(seed):
    tokenizer = random_merges(seed)
    encoder = Encoder(tokenizer)
    generator = np.random.default_rng(seed)
    texts = ["".join(generator.choice(list("abc "), size=300)) for _ in range(20)]
    assert_same_ids(encoder, tokenizer, texts)
    assert encoder.name == FAST


def test_every_character_is_split_from_its_neighbours_as_the_reference_does(tokenizer):
    points = [*range(0x3400), *range(0x3400, 0xD800, 19), *range(0xE000, 0x110000, 19)]
    texts = [
        "".join(f"a{chr(point)}1 {chr(point)}'s\n" for point in points[start : start + 500])
        for start in range(0, len(points), 500)
    ]
    assert_same_ids(Encoder(tokenizer), tokenizer, texts)


@pytest.mark.slow
def test_runs_of_a_megabyte_are_encoded(tokenizer):
    units = ("a", " ", "\n", "\xe9", "\U0001f9ff", "ACGTTGCA", "!?", "0")
    texts = [unit * (1_000_000 // len(unit.encode())) for unit in units]
    assert_same_ids(Encoder(tokenizer), tokenizer, texts)


def test_cache_that_has_grown_is_released_and_the_ids_stay(tokenizer, monkeypatch):
    built = []
    build = encoders._Gigatoken._build
    monkeypatch.setattr(encoders, "_GROWTH_BYTES", -1 << 40)
    monkeypatch.setattr(encoders._Gigatoken, "_build", lambda self: built.append(build(self)))
    encoder = Encoder(tokenizer)
    for seed in range(3):
        assert_same_ids(encoder, tokenizer, random_texts(5, seed))
    assert len(built) > 3


def test_without_gigatoken_the_reference_encodes_with_one_warning(tokenizer, monkeypatch, capfd):
    monkeypatch.setitem(sys.modules, "gigatoken.gigatoken_rs", None)
    for _ in range(2):
        encoder = Encoder(tokenizer)
        assert encoder.name == f"tokenizers {tokenizers.__version__}"
        assert_same_ids(encoder, tokenizer, make_texts(3, 20))
    warning = capfd.readouterr().err
    assert warning.count("\n") == 1
    assert "gigatoken cannot be used (ModuleNotFoundError" in warning
    assert f"encoding with tokenizers {tokenizers.__version__}" in warning


@pytest.mark.parametrize("bad_text", [DIFFICULT_TEXTS[4], "0-3: a document that only comes later"])
def test_wrong_ids_are_detected_and_the_reference_encodes(tokenizer, monkeypatch, capfd, bad_text):
    encode = encoders._Gigatoken.encode

    def wrong(self, texts):
        pairs = zip(texts, encode(self, texts), strict=True)
        return [ids + (text == bad_text) for text, ids in pairs]

    monkeypatch.setattr(encoders._Gigatoken, "encode", wrong)
    encoder = Encoder(tokenizer)
    assert_same_ids(encoder, tokenizer, [*make_texts(3, 20), bad_text])
    assert encoder.name == f"tokenizers {tokenizers.__version__}"
    assert f"{FAST} gives other ids for {bad_text!r}" in capfd.readouterr().err


BYTE_LEVEL = {"type": "ByteLevel", "use_regex": True, "add_prefix_space": False}


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "Lowercase"}},
        {"pre_tokenizer": None},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": []}},
        {"pre_tokenizer": BYTE_LEVEL | {"use_regex": False}},
        {"pre_tokenizer": BYTE_LEVEL | {"add_prefix_space": True}},
        {"added_tokens": [{"special": False}]},
        {"model": {"type": "Unigram"}},
        {"model": {"vocab": {"a": 0}}},
        {"model": {"dropout": 0.5}},
        {"model": {"unk_token": "<unk>"}},
        {"model": {"a field of a later version": 1}},
    ],
)
def test_other_vocabularies_use_the_reference(tokenizer, change):
    content = tokenizer.content()
    assert encoders._is_byte_level_bpe(content)
    model = content["model"] | change.get("model", {})
    assert not encoders._is_byte_level_bpe({**content, **change, "model": model})
