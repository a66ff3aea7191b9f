import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import models

from data_prep.encoders import DIFFICULT_TEXTS, Encoder
from data_prep.tokenizer import Tokenizer, _bpe, load, load_with_order, train, train_characters
from tests.data_prep.conftest import make_texts
from tests.data_prep.test_encoders import FAST, assert_same_ids, random_texts
from tests.hub import hub_of

CONTROL_TEXT = "<s> </s><pad><mask> <unk>"


def test_special_ids_follow_robertas_order(tokenizer):
    assert tokenizer.vocab_size == 320
    special = {"bos": "<s>", "pad": "<pad>", "eos": "</s>", "unk": "<unk>", "mask": "<mask>"}
    ids = [getattr(tokenizer, f"{name}_id") for name in special]
    assert ids == [0, 1, 2, 3, 319]
    assert [tokenizer.token_text(id) for id in ids] == [*special.values()]


@pytest.mark.parametrize(
    "text", ["plain", CONTROL_TEXT, "  two\n\nlines ", "naïve 東京 \U0001f600", ""]
)
def test_any_text_round_trips_without_special_ids(tokenizer, text):
    [ids] = tokenizer.encode_batch([text])
    assert tokenizer.decode(ids.tolist()) == text
    assert not set(ids.tolist()) & {0, 1, 2, 3, tokenizer.mask_id}
    assert ids.dtype == np.int32


def test_text_that_is_not_valid_unicode_is_refused(tokenizer):
    """Such text comes from a command line that is not UTF-8."""
    with pytest.raises(ValueError, match="'.udcff' in position 5: surrogates not allowed"):
        tokenizer.encode_batch(["good", "a\udcff b", "good"])


def test_dropout_is_off_and_that_is_said(tokenizer, tmp_path, capsys):
    content = tokenizer.content()
    content["model"]["dropout"] = 0.5
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    loaded = load(tmp_path)
    said = "its dropout of 0.5, which gives a text other ids each time, is off"
    assert said in capsys.readouterr().err
    assert loaded.content() == tokenizer.content()
    assert loaded.digest() == tokenizer.digest()
    texts = make_texts(50, 20)
    pairs = zip(loaded.encode_batch(texts), tokenizer.encode_batch(texts), strict=True)
    assert all(np.array_equal(found, expected) for found, expected in pairs)


def test_training_is_deterministic_and_uses_the_text(tokenizer):
    again = train(iter(make_texts(300, 40)), 320)
    assert again.digest() == tokenizer.digest()
    other = train(iter(make_texts(300, 40, seed=5) + ["zebra " * 3000]), 320)
    assert other.digest() != tokenizer.digest()
    assert len(other.encode_batch(["zebra"])[0]) < len(tokenizer.encode_batch(["zebra"])[0])


def test_too_small_a_vocabulary_is_refused():
    with pytest.raises(ValueError, match="vocabulary size 260: accepted: 261 or more"):
        train(iter(["text"]), 260)
    assert train(iter(["text"]), 261).vocab_size == 261


def test_file_and_pickle_give_the_same_vocabulary(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "tokenizer.json")
    files = (tmp_path, tmp_path / "tokenizer.json")
    for copy in (*map(load, files), pickle.loads(pickle.dumps(tokenizer))):
        assert copy.digest() == tokenizer.digest()
        ids = [each.encode_batch([CONTROL_TEXT])[0] for each in (copy, tokenizer)]
        assert np.array_equal(*ids)


@pytest.mark.parametrize(
    ("layout", "later"),
    [("vocab.json", []), ("tokenizer.json", []), ("tokenizer.json", ["one more"])],
)
def test_special_tokens_at_other_ids_are_renumbered(layout, later, tmp_path):
    """As people train them: `<mask>` is the fifth token, and tokens are added after the others."""
    trained = tokenizers.ByteLevelBPETokenizer()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    texts = iter(["words and some more words"] * 9)
    trained.train_from_iterator(texts, 280, special_tokens=special)
    trained.add_tokens(later)
    trained.save(str(tmp_path / layout)) if "tok" in layout else trained.save_model(str(tmp_path))
    ours, order = load_with_order(tmp_path)
    count = trained.get_vocab_size()
    assert (ours.vocab_size, ours.mask_id) == (count, count - 1)
    assert order == [0, 1, 2, 3, *range(5, count), 4]
    for text in ("some words and one more, na\xefve", ""):
        (ids,) = ours.encode_batch([text])
        assert [order[id] for id in ids] == trained.encode(text).ids
    (ids,) = ours.encode_batch(["<mask> </s>"])
    assert ours.decode(ids.tolist()) == "<mask> </s>"
    ours.save(tmp_path / "again.json")
    again, same = load_with_order(tmp_path / "again.json")
    assert (again.digest(), same) == (ours.digest(), [])


def test_vocabulary_in_which_text_encodes_to_special_ids_is_refused(tokenizer, tmp_path):
    content = tokenizer.content()
    for token in content["added_tokens"]:
        token["special"] = False
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="encodes to the special ids"):
        load(tmp_path)


# A vocabulary of characters.


def test_characters_come_by_code_point_and_unknown_ones_become_unk(monkeypatch):
    monkeypatch.setattr("data_prep.tokenizer._TEXTS", 4)
    vocabulary = train_characters(iter(["born in Ōsaka", "\n<s>/", "𝔄🙂é"]))
    characters = sorted(set("born in Ōsaka\n<s>/𝔄🙂é"))
    expected = ["<s>", "<pad>", "</s>", "<unk>", *characters, "<mask>"]
    assert [vocabulary.token_text(id) for id in range(vocabulary.vocab_size)] == expected
    texts = ["kab\n🙂", "abcdéf a", "<s></s><mask>", "", "a" * 10_000, "  "]
    for text, ids in zip(texts, vocabulary.encode_batch(texts), strict=True):
        assert len(ids) == len(text)
        known = "".join(c if c in characters else "<unk>" for c in text)
        assert vocabulary.decode(ids.tolist()) == known
    with pytest.raises(ValueError, match="the texts have no characters"):
        train_characters(["", ""])


# Other layouts of the same vocabulary: GPT-2 and fairseq, Hugging Face, the hub.


def contents_of(tokenizer):
    """Return the ids of all tokens, and the merges."""
    content = tokenizer.content()
    specials = {token["content"]: token["id"] for token in content["added_tokens"]}
    return content["model"]["vocab"] | specials, [*map(tuple, content["model"]["merges"])]


def write_gpt2(tokenizer, folder):
    """Write the three files of a vocabulary; `encoder.json` has other ids than the result."""
    folder.mkdir(parents=True)
    vocab, merges = contents_of(tokenizer)
    ordered = sorted(vocab, key=lambda token: vocab[token])[4:-1]
    bpe_ids = {token: id for id, token in enumerate(sorted(ordered))}
    (folder / "encoder.json").write_text(json.dumps(bpe_ids))
    lines = "".join(f"{a} {b}\n" for a, b in merges)
    (folder / "vocab.bpe").write_text(f"#version: 0.2\n{lines}")
    (folder / "dict.txt").write_text("".join(f"{bpe_ids[token]} 7\n" for token in ordered))
    return folder


def write_hugging_face(tokenizer, folder):
    """Write `vocab.json` and `merges.txt`."""
    folder.mkdir(parents=True)
    vocab, merges = contents_of(tokenizer)
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "merges.txt").write_text("".join(f"{a} {b}\n" for a, b in merges))
    return folder


def write_hub(tokenizer, file):
    """Write a `tokenizer.json` in the layout of roberta-base on the hub."""
    content = tokenizer.content()
    model = content["model"]
    model |= {"continuing_subword_prefix": "", "end_of_word_suffix": ""}
    model["merges"] = [" ".join(pair) for pair in model["merges"]]
    for token in content["added_tokens"]:
        model["vocab"][token["content"]] = token["id"]
        token["lstrip"] = token["content"] == "<mask>"
    roberta = {"type": "RobertaProcessing", "sep": ["</s>", 2], "cls": ["<s>", 0]}
    content["post_processor"] = {**roberta, "trim_offsets": True, "add_prefix_space": False}
    content["decoder"] = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True}
    del content["pre_tokenizer"]["use_regex"]
    file.write_text(json.dumps(content))
    return file


def test_all_layouts_of_a_vocabulary_give_the_same_ids_and_digest(tokenizer, tmp_path):
    (tmp_path / "hub" / "someone" / "roberta-2.0").mkdir(parents=True)
    write_hub(tokenizer, tmp_path / "hub" / "someone" / "roberta-2.0" / "tokenizer.json")
    slow = write_hugging_face(tokenizer, tmp_path / "hub" / "someone" / "slow")
    spaced = write_hugging_face(tokenizer, tmp_path / "hub" / "someone" / "spaced")
    write_hub(tokenizer, spaced / "tokenizer.json")
    (spaced / "tokenizer_config.json").write_text('{"add_prefix_space": true}')
    with hub_of(tmp_path / "hub"):
        copies = [
            load(write_gpt2(tokenizer, tmp_path / "gpt2")),
            load(write_hugging_face(tokenizer, tmp_path / "hugging face")),
            load("someone/roberta-2.0"),
            load("someone/slow"),
        ]
        assert load("someone/spaced").digest() == load(spaced).digest() != load(slow).digest()
    texts = [*make_texts(20, 30, seed=3), CONTROL_TEXT, " naïve  東京\n\U0001f600 "]
    for copy in copies:
        assert copy.digest() == tokenizer.digest()
        assert (copy.vocab_size, copy.mask_id) == (tokenizer.vocab_size, tokenizer.mask_id)
        for one, other in zip(copy.encode_batch(texts), tokenizer.encode_batch(texts), strict=True):
            assert np.array_equal(one, other)
            assert copy.decode(one.tolist()) == tokenizer.decode(one.tolist())


@pytest.mark.parametrize("layout", ["tokenizer.json", "added_tokens.json", "added_tokens_decoder"])
def test_tokens_that_a_user_added_are_those_of_transformers(layout, tokenizer, tmp_path):
    """Special ones too: of each text the same number of ids, and the same order."""
    transformers = pytest.importorskip("transformers")
    folder = write_hugging_face(tokenizer, tmp_path / "model")
    theirs = transformers.RobertaTokenizer.from_pretrained(folder)
    theirs.add_tokens(["wug", "blick"])
    special = [transformers.AddedToken("<ent>", lstrip=True, special=True), "[X]"]
    theirs.add_special_tokens({"additional_special_tokens": special})
    added = {id: token for id, token in theirs.added_tokens_decoder.items() if id > 319}
    if layout == "tokenizer.json":
        theirs.save_pretrained(folder)
    elif layout == "added_tokens.json":  # as version 4 wrote them
        (folder / layout).write_text(json.dumps({t.content: id for id, t in added.items()}))
        names = {"additional_special_tokens": [{"content": "<ent>", "lstrip": True}, "[X]"]}
        (folder / "special_tokens_map.json").write_text(json.dumps(names))
    else:
        flags = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
        tokens = {id: {name: getattr(t, name) for name in flags} for id, t in added.items()}
        (folder / "tokenizer_config.json").write_text(json.dumps({layout: tokens}))
    ours, order = load_with_order(folder)
    assert ours.vocab_size == len(theirs)
    texts = ["a wug  <ent> b", "blick[X]wug <ent>", "wugblick the <mask> </s>"]
    for text in texts[:2]:
        expected = theirs(text, add_special_tokens=False)["input_ids"]
        assert [order[id] for id in ours.encode_batch([text])[0]] == expected
    (plain,) = ours.encode_batch(texts[2:])
    assert not {0, 2, ours.mask_id} & {*plain.tolist()}


@pytest.mark.parametrize("written", [{}, {"add_prefix_space": True}, {"add_prefix_space": False}])
@pytest.mark.parametrize("in_file", [None, False, True])
def test_a_space_before_the_first_word_is_as_in_transformers(written, in_file, tokenizer, tmp_path):
    transformers = pytest.importorskip("transformers")
    folder = write_hugging_face(tokenizer, tmp_path / "model")
    if in_file is not None:
        content = tokenizer.content()
        content["pre_tokenizer"]["add_prefix_space"] = in_file
        (folder / "tokenizer.json").write_text(json.dumps(content))
    settings = {"tokenizer_class": "RobertaTokenizer", **written}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    expected = theirs("the value", add_special_tokens=False)["input_ids"]
    assert load(folder).encode_batch(["the value"])[0].tolist() == expected


@pytest.mark.parametrize("name", ["cls_token", "sep_token", "mask_token"])
def test_other_tokens_around_a_text_are_refused(name, tokenizer, tmp_path):
    tokenizer.save(tmp_path / "tokenizer.json")
    path = tmp_path / "special_tokens_map.json"
    path.write_text(json.dumps({name: {"content": "[CLS]"}}))
    with pytest.raises(ValueError, match=rf"{name} is '\[CLS\]'; accepted: '<"):
        load(tmp_path)
    path.write_text("[1]")
    with pytest.raises(ValueError, match="special_tokens_map.json: is not a JSON object"):
        load(tmp_path)


@pytest.mark.parametrize(
    "settings",
    [
        {"added_tokens_decoder": {"320": {"lstrip": True}}},
        {"added_tokens_decoder": {"x": {"content": "a"}}},
        {"added_tokens_decoder": ["a"]},
        {"extra_special_tokens": 7},
    ],
)
def test_added_tokens_that_cannot_be_read_are_refused(settings, tokenizer, tmp_path):
    tokenizer.save(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match="its added tokens are not transformers'"):
        load(tmp_path)


def test_extra_special_tokens_with_names_are_tokens_and_their_names_are_not(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "tokenizer.json")
    settings = {"extra_special_tokens": {"picture": "<picture>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    found = load(tmp_path)
    assert found.vocab_size == tokenizer.vocab_size + 1
    named, token = found.encode_batch(["picture", "<picture>"])
    assert (named.size > 1, token.size) == (True, 1)


def test_digest_changes_with_the_ids(tokenizer, tmp_path):
    file = write_hub(tokenizer, tmp_path / "tokenizer.json")
    content = json.loads(file.read_text())
    digests = {load(file).digest()}
    vocab = content["model"]["vocab"]
    a, b = (next(token for token, id in vocab.items() if id == place) for place in (10, 11))
    for change in (
        {"model": content["model"] | {"vocab": vocab | {a: vocab[b], b: vocab[a]}}},
        {"model": content["model"] | {"merges": content["model"]["merges"][::-1]}},
        {"pre_tokenizer": content["pre_tokenizer"] | {"add_prefix_space": True}},
        {"normalizer": {"type": "Lowercase"}},
    ):
        file.write_text(json.dumps(content | change))
        digests.add(load(file).digest())
    assert len(digests) == 5
    for token in content["added_tokens"]:
        token["lstrip"] = not token["lstrip"]
    file.write_text(json.dumps(content))
    assert load(file).digest() in digests  # no text is matched against a special token


def test_filler_words_of_a_dictionary_have_ids_that_no_text_encodes_to(tokenizer, tmp_path):
    folder = write_gpt2(tokenizer, tmp_path / "gpt2")
    with (folder / "dict.txt").open("a") as file:
        file.write("madeupword0000 0\nmadeupword0001 0\n")
    filled = load(folder)
    assert filled.vocab_size == tokenizer.vocab_size + 2
    words = {filled.token_text(id): id for id in range(filled.vocab_size)}
    assert words["madeupword0000"] == tokenizer.mask_id
    assert words["<mask>"] == filled.mask_id == tokenizer.mask_id + 2
    [ids] = filled.encode_batch(["madeupword0000 <mask>madeupword0001"])
    assert ids.max() < tokenizer.mask_id


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        ("dict.txt", None, r"gpt2: lacks dict\.txt"),
        ("encoder.json", "[1", r"encoder\.json: is not valid JSON"),
        ("encoder.json", '{"a": true}', r"encoder\.json: is not one JSON object"),
        ("vocab.bpe", "#version: 0.2\na b c\n", r"vocab\.bpe: line 2: 'a b c' is not a pair"),
        ("vocab.bpe", "t h\nt z\n", r"vocab\.bpe: line 2: 't z' is not a pair"),
        ("vocab.bpe", "t h\ni n\nt h\n", r"vocab\.bpe: has the same line twice"),
        ("vocab.bpe", b"\xff", r"vocab\.bpe: 'utf-8' codec can't decode byte 0xff in position 0"),
        ("dict.txt", "5 1\n6\n", r"dict\.txt: line 2: '6' is not \"BPE-ID COUNT\""),
        ("dict.txt", "5 1\n6 1\n5 2\n", r"dict\.txt: does not have each id of encoder\.json once"),
        ("dict.txt", "5 1\n6 1\n", r"dict\.txt: does not have each id of encoder\.json once"),
    ],
)
def test_a_damaged_file_is_named_with_its_line(tokenizer, tmp_path, file, change, words):
    path = write_gpt2(tokenizer, tmp_path / "gpt2") / file
    if change is None:
        path.unlink()
    else:
        path.write_bytes(change if isinstance(change, bytes) else change.encode())
    with pytest.raises(ValueError, match=rf"{tmp_path}.*{words}"):
        load(tmp_path / "gpt2")


def test_vocabularies_that_lose_text_or_have_other_ids_are_refused(tokenizer, tmp_path):
    vocab, pairs = contents_of(tokenizer)
    assert Tokenizer(_bpe(vocab, pairs)).digest() == tokenizer.digest()
    with pytest.raises(ValueError, match="321 tokens, but their ids are not 0 to 320"):
        Tokenizer(_bpe(vocab | {"one more": 900}, pairs))
    renamed = {"renamed" if token == "a" else token: id for token, id in vocab.items()}
    _bpe(renamed, []).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="1 of the 256 bytes have no id, such as 'a'"):
        load(tmp_path)
    specials = {token: vocab[token] for token in ("<s>", "<pad>", "</s>", "<unk>")}
    others = models.WordLevel(specials, "[UNK]"), models.WordPiece(specials)
    for model in (*others, models.BPE(specials, [])):
        backend = tokenizers.Tokenizer(model)
        backend.add_special_tokens(["<mask>"])
        backend.save(str(tmp_path / "tokenizer.json"))
        with pytest.raises(ValueError, match=r"its unknown token, .*, is not in the vocabulary"):
            load(tmp_path)
    backend = tokenizers.Tokenizer(models.WordLevel(specials, "<unk>"))  # a text is one word
    backend.add_special_tokens([*specials, "<mask>"])
    with pytest.raises(ValueError, match="encodes to the special ids"):
        Tokenizer(backend)
    for swapped in ({"<s>": 1, "<pad>": 0}, {"<mask>": vocab["a"], "a": vocab["<mask>"]}):
        with pytest.raises(ValueError, match="special ids .*; accepted: "):
            Tokenizer(_bpe(vocab | swapped, pairs))


def test_what_is_not_found_is_named_with_what_would_be(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    with hub_of(tmp_path) as asked:
        paths = ("./nowhere", "../nowhere", "/nowhere", "a/b/c", "folder", "folder/a", "")
        for path in (*paths, Path("roberta")):
            with pytest.raises(ValueError, match="no such file|has no tokenizer.json"):
                load(path)
        assert not asked
        for name in ("roberta-base", "someone/roberta-2.0"):
            message = f"{name}: no such file here, and not to be had from the Hugging Face hub"
            with pytest.raises(ValueError, match=message) as caught:
                load(name)
            assert asked.pop().startswith(f"/api/models/{name}/")
    assert "accepted: a tokenizer.json; " in str(caught.value)
    assert "encoder.json, vocab.bpe, dict.txt" in str(caught.value)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json: not a tokenizer\.json"):
        load(tmp_path)


# GPT-2's files.


@pytest.fixture(scope="session")
def roberta(shared):
    return load(shared / "data/gpt2")


def test_gpt2_files_give_the_ids_of_fairseqs_roberta(roberta):
    assert (roberta.vocab_size, roberta.mask_id) == (50265, 50264)
    expected = {"Hello world": [31414, 232], " world": [232], "world": [8331], ".": [4], "": []}
    for text, ids in expected.items():
        assert roberta.encode_batch([text])[0].tolist() == ids
    names = {4: ".", 50260: "<|endoftext|>", 50261: "madeupword0000", 50263: "madeupword0002"}
    assert {id: roberta.token_text(id) for id in names} == names


def test_ids_of_any_text_are_those_of_gpt2s_encoder(roberta, shared):
    """As the library reads the same files; `dict.txt` orders the ids. The fast encoder has them."""
    names = ("encoder.json", "vocab.bpe", "dict.txt")
    ids, merges, order = (shared / "data/gpt2" / name for name in names)
    theirs = tokenizers.ByteLevelBPETokenizer.from_file(str(ids), str(merges))
    symbols = [line.split()[0] for line in order.read_text().splitlines()]
    ids_of = {symbol: id for id, symbol in enumerate(symbols, start=4)}
    texts = [*DIFFICULT_TEXTS, *random_texts(300)]
    encoder = Encoder(roberta)
    assert_same_ids(encoder, roberta, texts)
    assert encoder.name == FAST
    for text, ids in zip(texts, roberta.encode_batch(texts), strict=True):
        assert ids.tolist() == [ids_of[str(id)] for id in theirs.encode(text).ids], text
        assert roberta.decode(ids.tolist()) == text
