import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from data_prep.tokenizer import Tokenizer, encoder, load, train
from tests.data_prep.conftest import make_texts

CONTROL_TEXT = "<s> </s><pad><mask> <unk>"


def test_special_ids_stand_where_the_original_has_them(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 320
    names = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    ids = [0, 1, 2, 3, 319]
    assert [tokenizer.token_text(id) for id in ids] == names
    assert ids == [
        tokenizer.bos_id,
        tokenizer.pad_id,
        tokenizer.eos_id,
        tokenizer.unk_id,
        tokenizer.mask_id,
    ]


@pytest.mark.parametrize(
    "text", ["plain", CONTROL_TEXT, "  two\n\nlines ", "naïve 東京 \U0001f600", ""]
)
def test_any_text_survives_and_writes_no_special_id(tokenizer: Tokenizer, text: str) -> None:
    [ids] = tokenizer.encode_batch([text])
    assert tokenizer.decode(ids.tolist()) == text
    assert not set(ids.tolist()) & {0, 1, 2, 3, tokenizer.mask_id}
    assert ids.dtype == np.int32


def test_bulk_encoder_gives_the_same_ids(tokenizer: Tokenizer) -> None:
    texts = [*make_texts(50, 30, seed=9), CONTROL_TEXT]
    for bulk, one in zip(encoder(tokenizer)(texts), tokenizer.encode_batch(texts), strict=True):
        assert np.array_equal(bulk, one)


def test_training_is_deterministic_and_uses_the_text(tokenizer: Tokenizer) -> None:
    again = train(iter(make_texts(300, 40)), 320)
    assert again.digest() == tokenizer.digest()
    other = train(iter(make_texts(300, 40, seed=5) + ["zebra " * 3000]), 320)
    assert other.digest() != tokenizer.digest()
    assert len(other.encode_batch(["zebra"])[0]) < len(tokenizer.encode_batch(["zebra"])[0])


def test_too_small_a_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="vocabulary size 260: accepted: 261 or more"):
        train(iter(["text"]), 260)
    assert train(iter(["text"]), 261).vocab_size == 261


def test_little_text_gives_fewer_ids_with_mask_last() -> None:
    small = train(iter(["aa"]), 5000)
    assert 261 <= small.vocab_size < 5000
    assert small.token_text(small.vocab_size - 1) == "<mask>"


def test_file_and_pickle_give_the_same_vocabulary(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path / "tokenizer.json")
    copies = [
        load(tmp_path),
        load(tmp_path / "tokenizer.json"),
        pickle.loads(pickle.dumps(tokenizer)),
    ]
    for copy in copies:
        assert copy.digest() == tokenizer.digest()
        assert np.array_equal(
            copy.encode_batch([CONTROL_TEXT])[0], tokenizer.encode_batch([CONTROL_TEXT])[0]
        )


def test_digest_ignores_layout_and_sees_content(tokenizer: Tokenizer, tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    tokenizer.save(file)
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content, sort_keys=True))
    assert load(file).digest() == tokenizer.digest()
    content["model"]["merges"] = content["model"]["merges"][:-1]
    file.write_text(json.dumps(content))
    assert load(file).digest() != tokenizer.digest()


def test_what_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere: no such file; accepted: a tokenizer\.json"):
        load(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="no such file"):
        load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json: not a tokenizer\.json"):
        load(tmp_path)


def test_other_special_ids_are_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    tokenizer.save(file)
    backend = tokenizers.Tokenizer.from_file(str(file))
    backend.add_tokens(["one more"])
    backend.save(str(file))
    with pytest.raises(ValueError, match=r"special ids .*'<mask>': 319.*accepted: .*'<mask>': 320"):
        load(file)


def test_vocabulary_that_lets_text_write_control_ids_is_refused(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    file = tmp_path / "tokenizer.json"
    tokenizer.save(file)
    content = json.loads(file.read_text())
    for token in content["added_tokens"]:
        token["special"] = False
    file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="encodes to the special ids"):
        load(file)
