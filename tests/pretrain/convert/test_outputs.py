"""Models compute the same here and in transformers, whichever of them wrote the folder."""

import copy

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from safetensors.torch import load_file

from data_prep import unigram
from data_prep.tokenizer import Tokenizer
from pretrain.convert.model_folder import load_model
from pretrain.convert.reading import read_folder
from pretrain.convert.writing import save_model
from pretrain.model.classification import ClassificationConfig
from tests.pretrain.convert.conftest import (
    HEADS,
    MODELS,
    batch,
    check_same_logits,
    close,
    loaded,
    our_logits,
    task_of,
    their_logits,
)
from tests.pretrain.convert.contents import without_pair_projection

PLAIN = {
    "baseline": "RobertaForMaskedLM",
    "albert": "AlbertForMaskedLM",
    "albert-gelu": "AlbertForMaskedLM",
    "albert-one-segment": "AlbertForMaskedLM",
    "albert-groups": "AlbertForPreTraining",
    "albert-nothing-shared": "AlbertForPreTraining",
}
"""Models that transformers has itself."""


def opened(export, transformers):
    """What the printed line loads: the class that is printed, by its own code where it needs it."""
    kind, _, line = export.call.partition(" in Python: ")
    auto = line.partition(".")[0]
    model = eval(line, {auto: getattr(transformers, auto)})
    assert type(model).__name__ == kind
    needs_code = kind.startswith("Zeroclap")
    assert needs_code == ("trust_remote_code=True" in line) == any(export.folder.glob("*.py"))
    assert line.partition("(")[0] in (export.folder / "README.md").read_text()
    return model


@pytest.mark.parametrize("name", MODELS)
def test_the_line_that_is_printed_loads_a_model_with_our_logits(name, transformers, exported):
    """With no more weights than its file."""
    export = exported(name)
    model = opened(export, transformers)
    assert type(model).__name__ == PLAIN.get(name, f"Zeroclap{task_of(name)}")
    assert len(model.get_input_embeddings().weight) == export.contents.vocabulary.vocab_size
    weights = load_file(export.folder / "model.safetensors").values()
    assert sum(x.numel() for x in weights) == sum(x.numel() for x in model.parameters())
    check_same_logits(export.ours, model)


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize(
    "variant", ["baseline", "zero-clap", "modern", "albert", "albert-groups", "causal-alibi"]
)
def test_a_classifier_gives_the_same_logits_and_survives_a_round_trip(
    variant, name, transformers, exported
):
    head = HEADS[name]
    if variant == "causal-alibi" and head.pooling == "first":
        with pytest.raises(ValueError, match="pooling: 'first' .* must be 'mean' for a causal"):
            exported(variant, name)
        return
    export = exported(variant, name)
    model = opened(export, transformers)
    plain = variant in PLAIN and head.pooling == "first"
    assert type(model).__name__.startswith("Zeroclap") != plain
    check_same_logits(export.ours, model)
    ids, mask = batch(400)
    is_regression = head.classes == 1
    labels = torch.tensor([0.5, 2.0] if is_regression else [1, 0])
    logits, _ = our_logits(export.ours, ids, mask.bool())
    loss = F.mse_loss(logits[:, 0], labels) if is_regression else F.cross_entropy(logits, labels)
    close(model(input_ids=ids, attention_mask=mask, labels=labels).loss, loss)
    assert not head.labels or tuple(model.config.id2label.values()) == head.labels
    back = read_folder(export.folder)
    assert (back.classifier, back.config.pair_head) == (head, False)
    assert not back.has_head, "also where it would have no weights of its own"
    for key, weight in export.contents.weights.items():
        assert torch.equal(back.weights[key], weight), key
    if variant == "causal-alibi":
        with pytest.raises(ValueError, match="must be 'mean' for a causal model"):
            loaded(
                *(transformers, export.folder, "ForSequenceClassification"),
                classifier_pooling="first",
            )


@pytest.mark.parametrize("name", ["baseline", "zero-clap", "causal-rotary"])
def test_the_loss_on_labels_and_its_gradient_are_ours(name, transformers, exported):
    export = exported(name)
    ids, mask = batch(400)
    places, wanted = torch.tensor([3, 5, 30]), torch.tensor([9, 10, 11])
    labels = torch.full_like(ids, -100)
    # Logits of a causal model are compared with the label after them.
    labels.view(-1)[places + name.startswith("causal")] = wanted
    theirs, ours = loaded(transformers, export.folder, task_of(name)), export.ours.model
    ours = copy.deepcopy(ours)
    loss, _ = theirs(input_ids=ids, attention_mask=mask, labels=labels, return_dict=False)
    expected = F.cross_entropy(ours(ids, mask.bool(), places), wanted)
    close(loss, expected)
    loss.backward()
    expected.backward()
    gradient = ours.encoder.embeddings.tokens.weight.grad
    found = theirs.get_input_embeddings().weight.grad
    torch.testing.assert_close(found[: len(gradient)], gradient, atol=1e-5, rtol=1e-3)
    assert not found[len(gradient) :].any()


# --- models that transformers wrote --------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("RobertaForMaskedLM", {}),
        ("RobertaForMaskedLM", {"type_vocab_size": 2, "hidden_dropout_prob": 0.2}),
        *(("RobertaForSequenceClassification", {"num_labels": n}) for n in (1, 2, 3)),
        ("AlbertForMaskedLM", {"hidden_act": "gelu", "hidden_dropout_prob": 0.2}),
        ("AlbertForPreTraining", {"hidden_act": "gelu_new"}),
        ("AlbertForSequenceClassification", {"num_labels": 3}),
    ],
)
def test_a_model_of_theirs_gives_its_logits_here(kind, settings, theirs, tmp_path):
    """Read, written again, and loaded."""
    model = theirs(kind, **settings)
    model.save_pretrained(tmp_path / "theirs")
    back = read_folder(tmp_path / "theirs")
    save_model(tmp_path / "ours", back)
    ours = load_model(tmp_path / "ours")
    check_same_logits(ours, model)
    classes = settings.get("num_labels")
    head = ClassificationConfig(classes, dropout=0.1) if classes else None
    assert (ours.classifier and ours.classifier.config, back.has_head) == (head, not classes)
    assert (back.config.max_positions, back.config.dropout) == (
        *(40, settings.get("hidden_dropout_prob", model.config.hidden_dropout_prob)),
    )
    assert back.config.pair_head == (kind == "AlbertForPreTraining")
    leaves_out = ["token types"] if "type_vocab_size" in settings else []
    leaves_out += ["no head over the vocabulary"] if classes else []
    for note, part in zip(back.notes, leaves_out, strict=True):
        assert part in note


@torch.no_grad()
@pytest.mark.parametrize("kind", ["AlbertModel", "AlbertForPreTraining"])
def test_an_albert_without_a_pair_head_keeps_its_features_and_its_pooler(kind, theirs, tmp_path):
    """The encoder alone, and with a head over the vocabulary as on the hub; also written again."""
    model = theirs(kind)
    model.save_pretrained(tmp_path / "theirs")
    without_pair_projection(tmp_path / "theirs")
    back = read_folder(tmp_path / "theirs")
    save_model(tmp_path / "ours", back)
    encoder = getattr(model, "albert", model)
    ids, mask = batch(60)
    features = encoder(input_ids=ids, attention_mask=mask).last_hidden_state
    has_head = kind != "AlbertModel"
    for folder in (tmp_path / "theirs", tmp_path / "ours"):
        found = load_model(folder)
        close(found.model.encoder(ids, mask.bool())[mask.bool()], features[mask.bool()])
        again = found.contents
        assert again.pooler.keys() == {"weight", "bias"}
        for name, weight in encoder.pooler.state_dict().items():
            assert torch.equal(again.pooler[name], weight)
        assert (again.has_head, again.classifier) == (has_head, None)
        assert not again.config.pair_head
        assert again.notes == (() if has_head else ("there is no head over the vocabulary",))


FIRST = {
    "XLMRoberta": ["<s>", "<pad>", "</s>", "<unk>"],
    "Camembert": [*("<s>NOTUSED", "<pad>", "</s>NOTUSED", "<unk>", "<unk>NOTUSED", "<s>", "</s>")],
    "Albert": ["<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]"],
}
"""The first ids of vocabularies of pieces."""
OF_ALBERT = {"<s>": "[CLS]", "</s>": "[SEP]", "<mask>": "[MASK]"}


@pytest.fixture(params=FIRST)
def published(request, transformers, theirs, tmp_path):
    """A folder as those on the hub, in its own order of ids: kind, folder, model, tokenizer."""
    kind, first = request.param, FIRST[request.param]
    texts = ["The value of it is what it was, and this is all of it."] * 9
    ours = Tokenizer(unigram.train(texts, 320))
    pieces = [tuple(piece) for piece in ours.content()["model"]["vocab"][260:]]
    vocab = [*((token, 0.0) for token in first), *pieces]
    vocab += [] if kind == "Albert" else [("<mask>", 0.0)]
    words = getattr(transformers, f"{kind}Tokenizer")(vocab=vocab)
    ids = {f"{name}_token_id": getattr(words, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    spare = 3 * (kind == "Albert")
    task = "PreTraining" if kind == "Albert" else "MaskedLM"
    model = theirs(f"{kind}For{task}", **ids, vocab_size=len(words) + spare)
    folder = tmp_path / "published"
    words.save_pretrained(folder)
    model.save_pretrained(folder)
    return kind, folder, model, words


@torch.no_grad()
def test_a_published_model_gives_the_same_logits_of_a_text(published, transformers, tmp_path):
    """The rows of its tokens, and their biases, are in the order of our ids."""
    kind, folder, model, words = published
    is_albert = kind == "Albert"
    ours = load_model(folder)
    text = "What was it of </s> <mask> it?"
    (mine,) = ours.tokenizer.encode_batch([text])
    assert not {0, 2, ours.tokenizer.mask_id} & {*mine.tolist()}
    texts = "What was it?", "The value."
    parts = [part.tolist() for part in ours.tokenizer.encode_batch(texts)]
    ids = torch.tensor([ours.tokenizer.lay_out(parts, separators=1 if is_albert else 2)])
    inputs = words(*texts, return_tensors="pt", return_token_type_ids=is_albert)
    assert ids.shape == inputs["input_ids"].shape
    logits, pairs = our_logits(ours, ids, segments=inputs.get("token_type_ids"))
    found, found_pairs = their_logits(model, **inputs)
    names = [ours.tokenizer._backend.id_to_token(id) for id in range(len(words))]
    names = [OF_ALBERT.get(name, name) if is_albert else name for name in names]
    order = [words.convert_tokens_to_ids(name) for name in names]
    assert len({*order}) == len(words)
    close(found[..., order], logits[..., : len(words)])
    close(found_pairs, pairs)
    save_model(tmp_path / "again", read_folder(folder))
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "again")(*texts)
    assert again["input_ids"] == ids[0].tolist()
    assert not is_albert or again["token_type_ids"] == inputs["token_type_ids"][0].tolist()


@pytest.mark.parametrize("published", ["Albert"], indirect=True)
def test_ids_of_albert_need_their_vocabulary(published):
    _, folder, _, _ = published
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match="ALBERT's vocabulary; put its tokenizer.json into"):
        read_folder(folder)
