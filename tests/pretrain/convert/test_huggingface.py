"""Models to transformers and back: the same numbers there, the same model here."""

import ast
import dataclasses
import functools
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from safetensors.torch import load_file, save_file

from data_prep.tokenizer import train_unigram
from pretrain.convert import reading
from pretrain.convert.model_folder import load_model
from pretrain.convert.names import TOKEN_TYPES
from pretrain.convert.reading import read_folder
from pretrain.convert.writing import save_model
from pretrain.inference.fill_mask import fill_mask
from pretrain.model.classification import ClassificationConfig
from pretrain.model.classifier import Classifier
from pretrain.model.language_model import LanguageModel
from tests.pretrain.convert.conftest import (
    EXPORTED,
    HEADS,
    batch,
    loaded,
    random_model,
    two_segments,
)

MODEL = Path(reading.__file__).parents[1] / "model"
TOKENS = "encoder.embeddings.tokens.weight"
TINY = {  # RobertaConfig's settings of a tiny model
    "vocab_size": 60,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 42,
    "layer_norm_eps": 1e-5,
}


def with_mask(logits, model):
    """Our logits, and the lowest number for the mask where it has none of its own."""
    missing = model.config.vocab_size - logits.shape[-1]
    return F.pad(logits, (0, missing), value=torch.finfo(logits.dtype).min)


def real(tensor, places):
    return tensor.flatten(0, 1)[places]


def change(path, **values):
    """Set values of a JSON file; None removes."""
    content = {**json.loads(path.read_text()), **values}
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))


@pytest.mark.parametrize("variant", [v for v in EXPORTED if "causal" not in v])
@torch.no_grad()
def test_masked_variants_give_the_same_logits_in_transformers(variant, transformers, exported):
    export = exported(variant)
    ids, mask, places = batch(export.contents.vocabulary.vocab_size)
    model = loaded(transformers, export.folder)
    assert len(model.get_input_embeddings().weight) == export.contents.vocabulary.vocab_size
    expected = with_mask(export.model(ids, mask.bool(), places), model)
    for kind in (torch.long, torch.bool, torch.float):
        logits = model(input_ids=ids, attention_mask=mask.to(kind)).logits
        torch.testing.assert_close(real(logits, places), expected, atol=2e-5, rtol=0)
    everywhere = with_mask(export.model(ids[:1], None, torch.arange(24)), model)
    torch.testing.assert_close(model(input_ids=ids[:1]).logits[0], everywhere, atol=2e-5, rtol=0)


def test_reading_an_export_executes_nothing(exported, tmp_path):
    export = exported("zero-clap")
    folder = shutil.copytree(export.folder, tmp_path / "export")
    for path in folder.glob("*.py"):
        path.write_text("raise RuntimeError('read executes nothing')")
    back = read_folder(folder)
    assert back.config == export.contents.config
    assert back.vocabulary.digest() == export.contents.vocabulary.digest()
    assert (back.provenance, back.notes) == ({"step": 7}, ())


@pytest.mark.parametrize("variant", ["baseline", "zero-clap", "modern"])
@torch.no_grad()
def test_hidden_states_are_those_of_every_layer(variant, transformers, exported):
    export = exported(variant)
    ids, mask, places = batch(export.contents.vocabulary.vocab_size)
    expected = export.model.encoder.hidden_states(ids, mask.bool())
    settings = {"add_pooling_layer": False} if variant == "baseline" else {}
    encoder = transformers.AutoModel.from_pretrained(
        export.folder, trust_remote_code=True, **settings
    )
    for model in (loaded(transformers, export.folder), encoder):
        output = model(input_ids=ids, attention_mask=mask, output_hidden_states=True)
        for ours, theirs in zip(expected, output.hidden_states, strict=True):
            torch.testing.assert_close(real(theirs, places), real(ours, places), atol=2e-5, rtol=0)
    assert torch.equal(output.last_hidden_state, output.hidden_states[-1])


@pytest.mark.parametrize("variant", ["baseline", "zero-clap"])
def test_the_loss_on_labels_and_its_gradient_are_ours(variant, transformers, exported):
    export = exported(variant)
    ids, mask, _ = batch(export.contents.vocabulary.vocab_size)
    places = torch.tensor([3, 5, 30])
    labels = torch.full_like(ids, -100)
    labels.view(-1)[places] = torch.tensor([9, 10, 11])
    theirs = loaded(transformers, export.folder)
    loss, logits = theirs(input_ids=ids, attention_mask=mask, labels=labels, return_dict=False)
    assert logits.shape == (2, 24, export.contents.vocabulary.vocab_size)
    ours = LanguageModel(export.contents.config).eval()
    ours.load_state_dict(export.model.state_dict())
    expected = F.cross_entropy(ours(ids, mask.bool(), places), torch.tensor([9, 10, 11]))
    torch.testing.assert_close(loss, expected, atol=2e-5, rtol=0)
    loss.backward()
    expected.backward()
    gradient = ours.encoder.embeddings.tokens.weight.grad
    found = theirs.get_input_embeddings().weight.grad
    torch.testing.assert_close(found[: len(gradient)], gradient, atol=1e-5, rtol=1e-3)
    assert not found[len(gradient) :].any()


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("variant", ["baseline", "zero-clap", "modern", "albert", "pairs"])
def test_a_classifier_survives_a_round_trip(variant, name, transformers, exported):
    pairs = variant == "pairs"
    overrides = {"embedding_size": 16, "pair_head": True} if pairs else {}
    export = exported("albert" if pairs else variant, name, **overrides)
    head, config = HEADS[name], export.contents.config
    ids, mask, _ = batch(export.contents.vocabulary.vocab_size)
    inputs = {"input_ids": ids, "attention_mask": mask}
    segments = two_segments(ids) if config.segments else None
    inputs |= {"token_type_ids": segments} if config.segments else {}
    model = loaded(transformers, export.folder, "ForSequenceClassification")
    plain = variant in ("baseline", "albert", "pairs") and head.pooling == "first"
    assert type(model).__name__.startswith("Zeroclap") != plain
    with torch.no_grad():
        expected = Classifier(export.model.encoder, export.classifier)(ids, mask.bool(), segments)
    is_regression = head.classes == 1
    labels = torch.tensor([0.5, 2.0] if is_regression else [1, 0])
    output = model(**inputs, labels=labels)
    torch.testing.assert_close(output.logits, expected, atol=2e-5, rtol=0)
    loss = (
        F.mse_loss(expected[:, 0], labels) if is_regression else F.cross_entropy(expected, labels)
    )
    torch.testing.assert_close(output.loss, loss, atol=2e-5, rtol=0)
    if head.labels:
        assert tuple(model.config.id2label.values()) == head.labels
    back = read_folder(export.folder)
    assert (back.classifier, back.config.pair_head, back.has_head) == (head, False, False)
    for key, weight in export.contents.weights.items():
        assert torch.equal(back.weights[key], weight), key


@pytest.mark.parametrize(
    ("variant", "head", "overrides"),
    [
        *(("baseline", None, {}), ("baseline", "topic", {}), ("zero-clap", None, {})),
        *(("zero-clap", "topic", {}), ("causal-alibi", None, {}), ("albert", None, {})),
        *(("albert", None, {"pair_head": True}), ("alibi", None, {"pair_head": True})),
    ],
)
def test_the_line_that_is_printed_loads_the_class_that_is_printed(
    variant, head, overrides, transformers, exported
):
    export = exported(variant, head, **overrides)
    name, _, line = export.call.partition(" in Python: ")
    auto = line.partition(".")[0]
    model = eval(line, {auto: getattr(transformers, auto)})
    assert type(model).__name__ == name
    needs_code = name.startswith("Zeroclap")
    assert needs_code == ("trust_remote_code=True" in line) == any(export.folder.glob("*.py"))
    assert line.partition("(")[0] in (export.folder / "README.md").read_text()


def test_a_model_without_a_vocabulary_has_no_tokenizer_files(tokenizer, tmp_path):
    contents, _ = random_model("baseline", tokenizer)
    save_model(tmp_path / "without", dataclasses.replace(contents, vocabulary=None))
    assert not list((tmp_path / "without").glob("tokenizer*"))
    back = read_folder(tmp_path / "without")
    assert (back.vocabulary, back.notes) == (None, ())


def test_the_tokenizer_gives_our_ids(transformers, exported, tokenizer):
    for variant in ("baseline", "zero-clap"):
        theirs = transformers.AutoTokenizer.from_pretrained(
            exported(variant).folder, trust_remote_code=True
        )
        texts = ["The value of it.", "  two  spaces\n", "naïve 東京 \U0001f600", ""]
        ids = [ids.tolist() for ids in tokenizer.encode_batch(texts)]
        assert theirs(texts)["input_ids"] == [[0, *one, 2] for one in ids]
        pair = theirs(texts[0], texts[2])
        assert pair["input_ids"] == [0, *ids[0], 2, 2, *ids[2], 2]
        assert set(pair) == {"input_ids", "attention_mask"}
        of, dot = tokenizer.encode_batch(["of", "."])
        masked = [0, *of, tokenizer.mask_id, *dot, 2]
        assert theirs("of <mask>.")["input_ids"] == masked
        assert theirs.decode(masked[1:-1]) == "of<mask>."
        assert theirs.decode(ids[1]) == texts[1]
        padded = theirs(texts, padding=True, return_tensors="pt")
        assert padded["input_ids"][3].tolist()[2:] == [1] * (padded["input_ids"].shape[1] - 2)
    trained = exported("zero-clap").contents.config.max_positions
    assert theirs.model_max_length == trained, "so that pipelines truncate"
    assert len(theirs(" a" * 2 * trained, truncation=True)["input_ids"]) == trained
    card = (exported("zero-clap").folder / "README.md").read_text()
    assert f"truncates texts to {trained} tokens" in card
    assert "truncates" not in (exported("baseline").folder / "README.md").read_text()


@pytest.mark.parametrize("variant", ["baseline", "learned-clap", "zero-clap"])
def test_the_fill_mask_pipeline_gives_our_fillers(variant, transformers, exported, tokenizer):
    export = exported(variant)
    pipeline = transformers.pipeline("fill-mask", model=str(export.folder), trust_remote_code=True)
    for text in ("The value of <mask> is.", "<mask> it", "value<mask>.", "a <mask> of <mask>"):
        theirs = pipeline(text, top_k=7)
        ours = fill_mask(export.model, tokenizer, text, top_k=7)
        for mine, other in zip(ours, theirs if len(ours) > 1 else [theirs], strict=True):
            assert [filler.token for filler in mine] == [filler["token_str"] for filler in other]
            assert [filler.probability for filler in mine] == pytest.approx(
                [filler["score"] for filler in other], abs=1e-5
            )
    every = pipeline("of <mask>", top_k=export.contents.config.vocab_size)
    assert len({filler["token"] for filler in every}) == export.contents.config.vocab_size


def test_the_text_classification_pipeline_gives_our_labels(transformers, exported):
    export = exported("zero-clap", "topic")
    pipeline = transformers.pipeline(
        "text-classification", model=str(export.folder), trust_remote_code=True
    )
    found = {answer["label"] for answer in pipeline("The value of it.", top_k=None)}
    assert found == set(HEADS["topic"].labels)


@torch.no_grad()
def test_alibi_reads_beyond_its_training_and_learned_positions_do_not(transformers, exported):
    ids = torch.randint(4, 100, (1, 100), generator=torch.Generator().manual_seed(1))
    export = exported("zero-clap")
    logits = loaded(transformers, export.folder)(input_ids=ids).logits[0]
    expected = export.model(ids, None, torch.arange(100))
    assert torch.allclose(logits[:, :-1], expected, atol=2e-5)
    clap = loaded(transformers, exported("learned-clap").folder)
    with pytest.raises(ValueError, match="learned positions end at 64"):
        clap(input_ids=ids)


def test_a_fresh_model_is_drawn_and_a_fresh_classifier_leaves_the_encoder_alone(
    transformers, exported
):
    export = exported("zero-clap")
    config = transformers.AutoConfig.from_pretrained(export.folder, trust_remote_code=True)
    assert (config.num_hidden_layers, config.num_attention_heads) == (2, 4)
    fresh = transformers.AutoModelForMaskedLM.from_config(config, trust_remote_code=True)
    assert fresh.head.beta.item() == 3.0
    assert 0.015 < fresh.encoder.layers[0].expand.weight.std() < 0.025
    assert not fresh.encoder.layers[0].expand.bias.any()
    config = transformers.AutoConfig.from_pretrained(
        exported("alibi").folder, trust_remote_code=True
    )
    drawn = transformers.AutoModelForMaskedLM.from_config(config, trust_remote_code=True)
    assert not drawn.head.bias.any()
    model, report = transformers.AutoModelForSequenceClassification.from_pretrained(
        export.folder, trust_remote_code=True, num_labels=5, output_loading_info=True
    )
    assert {name.split(".")[0] for name in report["missing_keys"]} == {"classifier"}
    assert model.classifier.projection.weight.shape == (5, 32)
    for name, weight in export.model.encoder.state_dict().items():
        assert torch.equal(model.encoder.state_dict()[name][: len(weight)], weight), name


def test_an_export_is_one_file_of_the_model_s_own_sources(exported):
    (file,) = exported("zero-clap").folder.glob("*.py")
    code = file.read_text()
    assert "SPDX-License-Identifier: Apache-2.0" in code.partition("\n")[0]
    names = [node.name for node in ast.parse(code).body if hasattr(node, "name")]
    assert len(names) == len({*names}) > 40
    for module in ("attention", "encoder", "positions"):
        _, definitions = (MODEL / f"{module}.py").read_text().split("\n\n\n", 1)
        assert definitions.strip() in code
    assert not re.search(r"^(from|import) (\.|pretrain)", code, re.MULTILINE)


def test_the_model_card_describes_the_model(exported):
    card = (exported("zero-clap", "topic").folder / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\npipeline_tag: text-classification\n")
    for part in ("trust_remote_code", '"step": 7'):
        assert part in card
    assert "trust_remote_code" not in (exported("baseline").folder / "README.md").read_text()


@pytest.mark.parametrize("values", [{"latents": 4}, {"head": "untied"}])
def test_what_transformers_cannot_compute_has_no_code_and_is_refused_there(
    values, tokenizer, transformers, exported, tmp_path
):
    pre_norm = {"layer_norm": "pre", "causal": True} if "latents" in values else {}
    contents, _ = random_model("baseline", tokenizer, **values, **pre_norm)
    note = save_model(tmp_path / "new", contents)
    assert note == "transformers cannot load it: it has latents, or an untied head"
    assert not any((tmp_path / "new").glob("*.py"))
    assert "from_pretrained" not in (tmp_path / "new" / "README.md").read_text()
    folder = exported("causal-alibi").folder
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True)
    fields = {**config.to_dict(), "position": "none", **values}
    with pytest.raises(ValueError, match="accepted: 0, and roberta, clap or tied"):
        type(config)(**fields)


# --- models that transformers wrote --------------------------------------------------------------


@pytest.fixture
def roberta(transformers):
    """`roberta(kind, **settings)`: a random model of transformers, no weight of it still zero."""

    def make(kind, **settings):
        torch.manual_seed(3)
        config = transformers.RobertaConfig(**{**TINY, **settings})
        model = getattr(transformers, kind)(config).eval()
        for weight in model.parameters():
            weight.data += 0.05 * torch.randn_like(weight)
        return model

    return make


@torch.no_grad()
def same_logits(folder, theirs):
    back = read_folder(folder)
    ours = LanguageModel(back.config).eval()
    ours.load_state_dict(back.weights)
    ids, mask, places = batch(60)
    logits = theirs(input_ids=ids, attention_mask=mask).logits
    torch.testing.assert_close(
        ours(ids, mask.bool(), places), real(logits, places), atol=2e-5, rtol=0
    )
    return back


@pytest.mark.parametrize("types", [1, 2])
def test_a_roberta_of_theirs_gives_the_same_logits_here(types, roberta, tmp_path):
    theirs = roberta("RobertaForMaskedLM", type_vocab_size=types, hidden_dropout_prob=0.2)
    theirs.save_pretrained(tmp_path)
    back = same_logits(tmp_path, theirs)
    assert (back.config.max_positions, back.config.dropout) == (40, 0.2)
    assert len(back.notes) == types - 1


@pytest.mark.parametrize("kind", ["XLMRoberta", "Camembert"])
@torch.no_grad()
def test_a_relative_of_roberta_gives_the_same_logits_of_a_text(kind, transformers, tmp_path):
    """With a unigram vocabulary in its own order of ids."""
    ours = train_unigram(["The value of it is what it was, and this is all of it."] * 9, 320)
    first = ["<s>", "<pad>", "</s>", "<unk>"]
    if kind == "Camembert":
        first = ["<s>NOTUSED", "<pad>", "</s>NOTUSED", "<unk>", "<unk>NOTUSED", "<s>", "</s>"]
    pieces = [tuple(piece) for piece in ours.content()["model"]["vocab"][260:]]
    vocab = [*((token, 0.0) for token in first), *pieces, ("<mask>", 0.0)]
    their_tokenizer = getattr(transformers, f"{kind}Tokenizer")(vocab=vocab)
    ids = {f"{name}_token_id": first.index(t) for name, t in (("bos", "<s>"), ("eos", "</s>"))}
    torch.manual_seed(3)
    settings = {**TINY, "vocab_size": len(vocab), "type_vocab_size": 1, "pad_token_id": 1, **ids}
    config = getattr(transformers, f"{kind}Config")(**settings)
    theirs = getattr(transformers, f"{kind}ForMaskedLM")(config).eval()
    theirs.lm_head.bias += torch.randn(len(vocab))
    theirs.save_pretrained(tmp_path)
    their_tokenizer.save_pretrained(tmp_path)
    found = load_model(tmp_path)
    text = "What was it of </s> <mask> it?"
    (mine,) = found.vocabulary.encode_batch([text])
    assert not {0, 2, found.vocabulary.mask_id} & {*mine.tolist()}
    (mine,) = found.vocabulary.encode_batch(["What was the value of it?"])
    inputs = their_tokenizer("What was the value of it?", return_tensors="pt")
    assert len(mine) + 2 == inputs["input_ids"].shape[1]
    logits = found.model(torch.tensor([[0, *mine, 2]]), None, torch.arange(len(mine) + 2))
    words = [found.vocabulary._backend.id_to_token(id) for id in range(len(vocab))]
    order = [their_tokenizer.convert_tokens_to_ids(word) for word in words]
    torch.testing.assert_close(logits, theirs(**inputs).logits[0][:, order], atol=2e-5, rtol=0)


def test_weights_in_several_files_are_read(roberta, tmp_path):
    theirs = roberta("RobertaForMaskedLM", type_vocab_size=1)
    theirs.save_pretrained(tmp_path, max_shard_size="30KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    same_logits(tmp_path, theirs)
    index = tmp_path / "model.safetensors.index.json"
    places = json.loads(index.read_text())["weight_map"]
    change(index, weight_map={**places, "lm_head.bias": "../elsewhere.safetensors"})
    with pytest.raises(ValueError, match="'../elsewhere.safetensors' is not a file of this folder"):
        read_folder(tmp_path)
    change(index, weight_map=places)
    pickled = {
        path: path.with_name(f"{number}.bin")
        for number, path in enumerate(sorted(tmp_path.glob("*.safetensors")))
    }
    for path, other in pickled.items():
        torch.save(load_file(path), other)
        path.unlink()
    with pytest.raises(ValueError, match="'model-0000.-of-.*' is not a file of this folder"):
        read_folder(tmp_path)
    index.unlink()
    others = {name: pickled[tmp_path / place].name for name, place in places.items()}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": others}))
    same_logits(tmp_path, theirs)


def test_the_layout_of_old_files_is_read(roberta, tmp_path):
    """Pickled tensors, gamma and beta, position ids, a pooler, tied weights a second time."""
    theirs = roberta("RobertaForMaskedLM", type_vocab_size=1)
    theirs.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    old = {
        "roberta.embeddings.position_ids": torch.arange(42)[None],
        "roberta.pooler.dense.weight": torch.ones(32, 32),
        "roberta.pooler.dense.bias": torch.ones(32),
    }
    for name, weight in theirs.state_dict().items():
        if "LayerNorm" in name:
            name = name.replace("weight", "gamma").replace("bias", "beta")
        old[name] = weight.clone()
    assert "lm_head.decoder.weight" in old
    torch.save(old, tmp_path / "pytorch_model.bin")
    same_logits(tmp_path, theirs)
    torch.save({**old, "lm_head.bias": functools.partial(print)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin: was not read"):
        read_folder(tmp_path)
    old["lm_head.decoder.weight"][5] += 1
    torch.save(old, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"lm_head\.decoder\.weight differs from"):
        read_folder(tmp_path)


@pytest.mark.parametrize("classes", [1, 2, 3])
@torch.no_grad()
def test_a_classifier_of_theirs_gives_the_same_logits_here(classes, roberta, tmp_path):
    theirs = roberta("RobertaForSequenceClassification", num_labels=classes, type_vocab_size=1)
    theirs.save_pretrained(tmp_path / "theirs")
    save_model(tmp_path / "ours", read_folder(tmp_path / "theirs"))
    ours = load_model(tmp_path / "ours")
    head = ours.classifier
    assert head.config == ClassificationConfig(classes, dropout=0.1)
    ids, mask, _ = batch(60)
    logits = Classifier(ours.model.encoder, head)(ids, mask.bool())
    expected = theirs(input_ids=ids, attention_mask=mask).logits
    torch.testing.assert_close(logits, expected, atol=2e-5, rtol=0)
    assert not ours.has_head


def test_the_vocabulary_is_read_from_either_layout_or_left_out(exported, tokenizer, tmp_path):
    folder = shutil.copytree(exported("baseline").folder, tmp_path / "model")
    content = json.loads((folder / "tokenizer.json").read_text())
    vocab = {**content["model"]["vocab"], "<mask>": tokenizer.mask_id}
    merges = [" ".join(pair) for pair in content["model"]["merges"]]
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    assert read_folder(folder).vocabulary.digest() == tokenizer.digest()
    swapped = {**vocab, "<s>": 1, "<pad>": 0}
    (folder / "vocab.json").write_text(json.dumps(swapped))
    back = read_folder(folder)
    assert back.vocabulary is None
    assert "special ids" in back.notes[0]
    (folder / "tokenizer.json").write_text('{"model"')
    with pytest.raises(ValueError, match=r"tokenizer\.json: is not valid JSON"):
        read_folder(folder)


def test_a_vocabulary_with_more_ids_than_the_model_has_rows_is_left_out(exported, tmp_path):
    folder = shutil.copytree(exported("baseline").folder, tmp_path / "model")
    content = json.loads((folder / "tokenizer.json").read_text())
    *others, mask = content["added_tokens"]
    added = [*others, {**mask, "content": "more", "special": False}]
    content["added_tokens"] = [*added, {**mask, "id": mask["id"] + 1}]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    back = read_folder(folder)
    assert back.vocabulary is None
    assert "has 401 ids, the model 400 rows" in back.notes[0]
    with pytest.raises(ValueError, match="has no vocabulary.*has 401 ids, the model 400 rows"):
        load_model(folder).tokenizer  # noqa: B018


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        ("baseline", {"hidden_act": "relu"}, "hidden_act is 'relu'; accepted: 'gelu'"),
        ("baseline", {"position_embedding_type": "relative_key"}, "is 'relative_key'"),
        ("baseline", {"pad_token_id": 0}, "pad_token_id is 0; accepted: 1"),
        ("baseline", {"quantization_config": {"bits": 4}}, "quantization_config is {'bits': 4}"),
        ("baseline", {"layer_norm_eps": None}, "has no layer_norm_eps"),
        ("baseline", {"hidden_size": "wide"}, "hidden_size: 'wide'"),
        ("baseline", {"hidden_size": 64}, r"\[400, 32\] instead of \[400, 64"),
        ("baseline", {"max_position_embeddings": 2}, "max_position_embeddings is 2"),
        ("baseline", {"max_position_embeddings": 10**12}, "its file has .* bytes"),
        ("baseline", {"num_hidden_layers": 3}, r"missing: roberta\.encoder\.layer\.2"),
        ("baseline", {"num_hidden_layers": 1}, r"left over: roberta\.encoder\.layer\.1"),
        ("baseline", {"model_type": "bert"}, "model_type 'bert'; accepted: 'roberta', "),
        ("albert", {"inner_group_num": 2}, "inner_group_num is 2; accepted: 1"),
        ("albert", {"hidden_act": "relu"}, "hidden_act is 'relu'; accepted: 'gelu', 'gelu_new'"),
        ("albert", {"embedding_size": 64}, "embedding_size: 64"),
        ("albert", {"num_hidden_groups": 3}, "layer_groups: 3"),
        ("albert", {"type_vocab_size": 3}, r"token_type_embeddings\.weight \[2, 32\] instead"),
        ("albert", {"embedding_size": None}, "has no embedding_size"),
        ("zero-clap", {"quantization_config": {"bits": 4}}, "quantization_config is {'bits': 4}"),
        ("zero-clap", {"vocab_size": None}, r"missing \['vocab_size'\]"),
        ("zero-clap", {"head": "wide"}, "head: 'wide'"),
        ("zero-clap", {"head": "roberta"}, r"left over: head\.beta$"),
        ("zero-clap", {"id2label": {"0": "a", "2": "b"}}, "id2label is .* must have a label"),
        ("zero-clap", {"problem_type": "multi_label_classification"}, "problem_type is"),
        ("zero-clap", {"classifier_pooling": "max"}, "pooling: 'max'"),
        ("zero-clap", {"mask_token_ids": [3]}, r"mask_token_ids is \[3\] with 400 rows"),
        ("zero-clap", {"mask_token_ids": 3}, "mask_token_ids is 3"),
    ],
)
def test_settings_that_our_model_lacks_are_named(kind, values, message, exported, tmp_path):
    head = "topic" if kind == "zero-clap" and "head" not in values else None
    folder = shutil.copytree(exported(kind, head).folder, tmp_path / "model")
    change(folder / "config.json", **values)
    with pytest.raises(ValueError, match=rf"(config\.json|model\.safetensors): .*{message}"):
        read_folder(folder)


def test_a_mask_with_another_id_moves_with_its_row(exported, tokenizer, tmp_path):
    """The same model after the ids were changed as in tokenizers that people train."""
    export = exported("baseline")
    folder = shutil.copytree(export.folder, tmp_path / "theirs")
    new = [0, 1, 2, 3, *range(5, tokenizer.vocab_size), 4]  # of each of our ids
    content = json.loads((folder / "tokenizer.json").read_text())
    vocab, added = content["model"]["vocab"], content["added_tokens"]
    content["model"]["vocab"] = {t["content"]: new[t["id"]] for t in added}
    content["model"]["vocab"] |= {token: new[id] for token, id in vocab.items()}
    content["added_tokens"] = [{**t, "id": new[t["id"]]} for t in added]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    weights = load_file(folder / "model.safetensors")
    for name in ("roberta.embeddings.word_embeddings.weight", "lm_head.bias"):
        weights[name] = weights[name][torch.tensor(new).argsort()]
    save_file(weights, folder / "model.safetensors")
    back = read_folder(folder)
    (note,) = back.notes
    assert f"<mask> has the last, {tokenizer.mask_id} (here 4)" in note
    assert back.vocabulary.digest() == tokenizer.digest()
    for name, weight in read_folder(export.folder).weights.items():
        assert torch.equal(back.weights[name], weight), name


def weights_without(*names, **more):
    def spoil(weights):
        kept = {name: weight for name, weight in weights.items() if name not in names}
        return kept | more

    return spoil


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (weights_without("lm_head.bias"), r"settings; missing: lm_head\.bias$"),
        (weights_without(TOKEN_TYPES), "token_type_embeddings.weight is missing"),
        (weights_without(**{TOKEN_TYPES: torch.ones(1, 31)}), r"is \[1, 31\]; accepted: .* of 32"),
    ],
)
def test_weights_that_do_not_fit_are_named(spoil, message, exported, tmp_path):
    folder = shutil.copytree(exported("baseline").folder, tmp_path / "model")
    path = folder / "model.safetensors"
    save_file(spoil(load_file(path)), path)
    with pytest.raises(ValueError, match=rf"model\.safetensors: .*{message}"):
        read_folder(folder)
