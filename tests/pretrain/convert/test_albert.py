"""ALBERT to transformers and back: the same numbers there, the same model here."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from data_prep.tokenizer import train_unigram
from pretrain.convert.model_folder import build, load_model
from pretrain.convert.names import ALBERT_PROJECTION, plain_type
from pretrain.convert.reading import read_folder
from pretrain.convert.writing import save_model
from pretrain.inference.fill_mask import fill_mask
from pretrain.model.classification import ClassificationConfig
from pretrain.model.classifier import Classifier
from tests.pretrain.convert.conftest import batch, loaded, random_model, two_segments

PLAIN = {
    "groups": {"pair_head": True, "embedding_size": 16, "num_layers": 4, "layer_groups": 2},
    "nothing shared": {"pair_head": True, "sharing": "none"},
    "no pairs": {"embedding_size": 16, "activation": "gelu", "segments": 3},
}
OWN = {
    "attention": {"sharing": "attention", "embedding_size": 16, "pair_head": True},
    "feed-forward": {"sharing": "feed-forward", "pair_head": True},
    "positions": {"position": "alibi", "embedding_size": 16, "pair_head": True},
}
TINY = {  # AlbertConfig's settings of a tiny model
    "vocab_size": 60,
    "embedding_size": 16,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_hidden_groups": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 40,
    "hidden_dropout_prob": 0.2,
    "pad_token_id": 1,
}


def close(theirs, ours):
    torch.testing.assert_close(theirs, ours, atol=1e-5, rtol=0)


@torch.no_grad()
def outputs(model, ids, mask, segments):
    """Our logits at the real tokens, and of the pairs where the model has such a head."""
    places = mask.flatten().nonzero().flatten()
    with_pairs = model.config.pair_head
    found = model(ids, mask.bool(), places, segment_ids=segments, with_pairs=with_pairs)
    return found if with_pairs else (found, None)


@torch.no_grad()
def same_outputs(ours, theirs, vocab_size):
    """Compare in two segments and without, with padding and without."""
    ids, mask, _ = batch(vocab_size)
    for real in (mask, torch.ones_like(mask)):
        for segments in (None, two_segments(ids)):
            logits, pairs = outputs(ours, ids, real, segments)
            found = theirs(input_ids=ids, attention_mask=real, token_type_ids=segments)
            key = "prediction_logits" if "prediction_logits" in found else "logits"
            close(found[key][real.bool()], logits)
            if pairs is not None:
                close(found["sop_logits" if "sop_logits" in found else "pair_logits"], pairs)


@pytest.mark.parametrize("name", PLAIN)
def test_an_albert_needs_no_code_of_ours(name, transformers, exported):
    export = exported("albert", None, **PLAIN[name])
    assert not list(export.folder.glob("*.py"))
    task = "PreTraining" if export.contents.config.pair_head else "MaskedLM"
    model = loaded(transformers, export.folder, f"For{task}")
    assert type(model) is getattr(transformers, f"AlbertFor{task}")
    same_outputs(export.model, model, export.contents.config.vocab_size)
    assert f"AutoModelFor{task}" in (export.folder / "README.md").read_text()


@pytest.mark.parametrize("name", OWN)
def test_other_models_with_pairs_carry_code_that_takes_segments(name, transformers, exported):
    export = exported("albert", None, **OWN[name])
    assert plain_type(export.contents.config) is None
    model = loaded(transformers, export.folder)
    same_outputs(export.model, model, export.contents.config.vocab_size)


def test_pair_logits_do_not_depend_on_the_side_of_the_padding(transformers, exported):
    model = loaded(transformers, exported("albert", None, **OWN["positions"]).folder)
    ids, mask, _ = batch(300)
    right = model(input_ids=ids, attention_mask=mask).pair_logits[1]
    left = model(input_ids=ids.roll(12, 1), attention_mask=mask.roll(12, 1)).pair_logits[1]
    close(left, right)


@pytest.mark.parametrize("task", ["", "ForMaskedLM", "ForSequenceClassification"])
def test_a_saved_copy_of_layers_that_share_is_the_same_model(
    task, transformers, exported, tmp_path
):
    head = "topic" if task == "ForSequenceClassification" else None
    export = exported("albert", head, **OWN["attention"])
    model = loaded(transformers, export.folder, task)
    assert model.base_model.layers[1].attention is model.base_model.layers[0].attention
    assert model.base_model.layers[1].expand is not model.base_model.layers[0].expand
    model.save_pretrained(tmp_path)
    again = loaded(transformers, tmp_path, task)
    ids, mask, _ = batch(300)
    inputs = {"input_ids": ids, "attention_mask": mask, "token_type_ids": two_segments(ids)}
    for ours, theirs in zip(model(**inputs).values(), again(**inputs).values(), strict=True):
        assert torch.equal(ours, theirs)
    back = read_folder(tmp_path)
    assert back.config.pair_head == (task == "ForMaskedLM")
    of_classifier = task == "ForSequenceClassification"
    assert (back.classifier is None, back.has_head) == (not of_classifier, task == "ForMaskedLM")


# --- text ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def vocabulary():
    texts = ["The value of it is what it was, and this value is all of it.", "What was it?"] * 9
    return train_unigram(texts, 320, lowercase=True)


@pytest.fixture(scope="module")
def english(vocabulary, tmp_path_factory):
    """A plain export with a unigram vocabulary, and its model."""
    contents, modules = random_model("albert", vocabulary, embedding_size=16, pair_head=True)
    folder = tmp_path_factory.mktemp("english") / "model"
    save_model(folder, contents)
    return folder, modules.model


def test_the_tokenizer_lays_out_segments(transformers, english, exported, vocabulary):
    theirs = transformers.AutoTokenizer.from_pretrained(english[0])
    a, b = (ids.tolist() for ids in vocabulary.encode_batch(["What was it?", "The value."]))
    pair = theirs("What was it?", "The value.")
    assert pair["input_ids"] == [0, *a, 2, *b, 2]
    assert pair["token_type_ids"] == [0] * (len(a) + 2) + [1] * (len(b) + 1)
    assert theirs("The value.")["input_ids"] == [0, *b, 2]
    assert theirs("The value.")["token_type_ids"] == [0] * (len(b) + 2)
    one = exported("albert", segments=1).folder
    pair = transformers.AutoTokenizer.from_pretrained(one)("of", "it")
    assert not any(pair["token_type_ids"])


def test_the_fill_mask_pipeline_gives_our_fillers(transformers, english, vocabulary):
    folder, ours = english
    pipeline = transformers.pipeline("fill-mask", model=str(folder))
    for text in ("The value of <mask> is.", "<mask> it", "It was <mask>."):
        (mine,) = fill_mask(ours, vocabulary, text, top_k=7)
        theirs = pipeline(text, top_k=7)
        assert [filler.token for filler in mine] == [filler["token_str"] for filler in theirs]
        assert [filler.probability for filler in mine] == pytest.approx(
            [filler["score"] for filler in theirs], abs=1e-5
        )


# --- models that transformers wrote --------------------------------------------------------------


@pytest.fixture
def albert(transformers):
    """`albert(kind, **settings)`: a random model of transformers, no weight of it still zero."""

    def make(kind, **settings):
        torch.manual_seed(3)
        config = transformers.AlbertConfig(**{**TINY, **settings})
        model = getattr(transformers, kind)(config).eval()
        for weight in model.parameters():
            weight.data += 0.05 * torch.randn_like(weight)
        return model

    return make


def language_model(contents):
    return build(Path(), contents).model


@pytest.mark.parametrize("kind", ["AlbertForPreTraining", "AlbertForMaskedLM"])
@pytest.mark.parametrize("hidden_act", ["gelu", "gelu_new"])
def test_an_albert_of_theirs_gives_the_same_logits_here(kind, hidden_act, albert, tmp_path):
    theirs = albert(kind, hidden_act=hidden_act)
    theirs.save_pretrained(tmp_path)
    back = read_folder(tmp_path)
    assert (back.config.layer_groups, back.config.sharing, back.config.dropout) == (2, "all", 0.2)
    assert back.config.pair_head == (kind == "AlbertForPreTraining")
    same_outputs(language_model(back), theirs, 60)


@torch.no_grad()
def test_an_encoder_alone_keeps_its_features_and_not_its_pooler(albert, tmp_path):
    theirs = albert("AlbertModel")
    theirs.save_pretrained(tmp_path)
    back = read_folder(tmp_path)
    ids, mask, places = batch(60)
    ours = language_model(back)
    features = theirs(input_ids=ids, attention_mask=mask).last_hidden_state
    close(features[mask.bool()], ours.encoder(ids, mask.bool(), places))
    assert not back.has_head
    pooler, head = back.notes
    assert "albert.pooler was left out" in pooler
    assert head == "there is no head over the vocabulary"


@torch.no_grad()
def test_a_classifier_of_theirs_gives_the_same_logits_here(albert, tmp_path):
    theirs = albert("AlbertForSequenceClassification", num_labels=3)
    theirs.save_pretrained(tmp_path / "theirs")
    save_model(tmp_path / "ours", read_folder(tmp_path / "theirs"))
    ours = load_model(tmp_path / "ours")
    head = ours.classifier
    assert head.config == ClassificationConfig(3, dropout=0.1)
    ids, mask, _ = batch(60)
    segments = two_segments(ids)
    found = theirs(input_ids=ids, attention_mask=mask, token_type_ids=segments).logits
    close(found, Classifier(ours.model.encoder, head)(ids, mask.bool(), segments))


@pytest.fixture
def published(transformers, albert, vocabulary, tmp_path):
    """A folder as those on the hub: a model with ALBERT's vocabulary, in its order of ids."""
    special = [(token, 0.0) for token in ("<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]")]
    pieces = [tuple(piece) for piece in vocabulary.content()["model"]["vocab"][260:]]
    tokenizer = transformers.AlbertTokenizer(vocab=[*special, *pieces])
    model = albert("AlbertForPreTraining", vocab_size=len(tokenizer) + 3, pad_token_id=0)
    tokenizer.save_pretrained(tmp_path / "published")
    model.save_pretrained(tmp_path / "published")
    return tmp_path / "published", model, tokenizer


@torch.no_grad()
def test_a_published_model_gives_the_same_logits_of_a_text(published, transformers, tmp_path):
    """The rows of its tokens, and their biases, are in the order of our ids."""
    folder, theirs, their_tokenizer = published
    back = read_folder(folder)
    ours, vocabulary = language_model(back), back.vocabulary
    texts = "What was it?", "The value."
    a, b = (ids.tolist() for ids in vocabulary.encode_batch(texts))
    ids = torch.tensor([[0, *a, 2, *b, 2]])
    inputs = their_tokenizer(*texts, return_tensors="pt", return_token_type_ids=True)
    assert ids.shape == inputs["input_ids"].shape
    logits, pairs = outputs(ours, ids, torch.ones_like(ids), inputs["token_type_ids"])
    found = theirs(**inputs)
    close(found.sop_logits, pairs)
    names = ["[CLS]", "<pad>", "[SEP]", "<unk>", "[MASK]"]
    names_here = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    here = {name: id for id, (name, _) in enumerate(vocabulary.content()["model"]["vocab"])}
    here["<mask>"] = vocabulary.mask_id
    for name, id in their_tokenizer.get_vocab().items():
        other = here[names_here[names.index(name)] if name in names else name]
        close(found.prediction_logits[0, :, id], logits[:, other])
    save_model(tmp_path / "again", back)
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "again")(
        *texts, return_tensors="pt"
    )
    assert torch.equal(again["input_ids"], ids)
    assert torch.equal(again["token_type_ids"], inputs["token_type_ids"])


def test_a_published_model_without_its_vocabulary_is_refused(published):
    folder, _, _ = published
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match="ALBERT's vocabulary; put its tokenizer.json into"):
        read_folder(folder)


def test_alberts_vocabulary_beside_another_model_is_left_out(published, exported, tmp_path):
    folder = shutil.copytree(exported("baseline").folder, tmp_path / "model")
    shutil.copy(published[0] / "tokenizer.json", folder)
    back = read_folder(folder)
    assert back.vocabulary is None
    assert "special ids: <pad> has 0" in back.notes[0]


def test_a_projection_between_equal_sizes_is_refused_unless_it_is_the_identity(exported, tmp_path):
    folder = shutil.copytree(exported("albert").folder, tmp_path / "model")
    path = folder / "model.safetensors"
    weights = load_file(path)
    weights[f"{ALBERT_PROJECTION}.weight"][0, 1] = 0.5
    save_file(weights, path)
    message = r"embedding_hidden_mapping_in\.weight changes the token vectors"
    with pytest.raises(ValueError, match=message):
        read_folder(folder)
