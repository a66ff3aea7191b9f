"""An export that sentence-transformers opens as it stands: with the vectors of our encoder."""

import dataclasses
import json
import warnings

import numpy as np
import pytest
import torch

from pretrain.convert import conversion, huggingface_export
from pretrain.models import model_folder
from tests.pretrain.convert.conftest import HEADS
from tests.pretrain.models.contents import random_contents

TEXTS = ["The file is returned.", "Return", "The name of the class is the name of the module."]


@pytest.fixture(scope="module")
def library(transformers):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("sentence_transformers")


def export(tmp_path, tokenizer, variant, head=None):
    """Return a model folder and its export, both with the same random weights."""
    contents = random_contents(variant, tokenizer, HEADS)
    model_folder.save_model(tmp_path / "model", contents)
    notes = conversion.convert(
        tmp_path / "model", "sentence-transformers", tmp_path / "out", head=head
    )
    return model_folder.load_model(tmp_path / "model"), tmp_path / "out", notes


def vectors(loaded, pooling):
    found = []
    for text in TEXTS:
        (ids,) = loaded.tokenizer.encode_batch([text])
        ids = torch.tensor([loaded.tokenizer.lay_out([ids.tolist()], 2)])
        segments = torch.zeros_like(ids) if loaded.model.config.segments else None
        with torch.no_grad():
            features = loaded.model.encoder(ids, None, segment_ids=segments)[0]
        found.append(features[0] if pooling == "first" else features.mean(dim=0))
    return torch.stack(found).numpy()


@pytest.mark.parametrize("variant", ["baseline", "zero-clap", "alibi", "albert"])
@pytest.mark.parametrize(("head", "pooling"), [(None, "mean"), ("topic", "first")])
def test_the_vectors_of_texts_are_those_of_our_encoder(
    library, tokenizer, tmp_path, variant, head, pooling
):
    loaded, folder, (note, *_) = export(tmp_path, tokenizer, variant, head)
    call = note.partition("): ")[2]
    model = eval(call, {"SentenceTransformer": library.SentenceTransformer})
    found = model.to("cpu").encode(TEXTS)
    assert np.allclose(found, vectors(loaded, pooling), atol=1e-5)
    assert f"{pooling} of tokens" in note


def test_the_card_is_that_of_sentence_transformers(tokenizer, tmp_path):
    _, folder, _ = export(tmp_path, tokenizer, "zero-clap")
    card = (folder / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: sentence-transformers\npipeline_tag: sentence-sim")
    assert "SentenceTransformer(folder, trust_remote_code=True)" in card
    assert "`model.max_seq_length`" in card
    assert "classifier_name" not in json.loads((folder / "config.json").read_text())


def test_what_gives_no_vector_of_a_text_is_refused_and_nothing_written(tokenizer, tmp_path):
    contents = random_contents("zero-clap", tokenizer, HEADS)
    causal = random_contents("causal-alibi", tokenizer, HEADS)
    silent = dataclasses.replace(contents, vocabulary=None)
    with pytest.raises(ValueError, match="has no such head"):
        huggingface_export.write_folder(tmp_path / "new", contents, "mood", embeddings=True)
    with pytest.raises(ValueError, match="pooling: 'first' is not accepted"):
        huggingface_export.write_folder(tmp_path / "new", causal, "topic", embeddings=True)
    with pytest.raises(ValueError, match="the model has no vocabulary"):
        huggingface_export.write_folder(tmp_path / "new", silent, embeddings=True)
    with pytest.raises(ValueError, match="--plain: "):
        huggingface_export.write_folder(
            tmp_path / "new", contents, only_plain=True, embeddings=True
        )
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_contrastive_training_brings_similar_texts_nearer(library, tokenizer, tmp_path):
    """With their trainer, as the guide shows; against texts that are not similar."""
    import datasets
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    _, folder, _ = export(tmp_path, tokenizer, "zero-clap")
    model = library.SentenceTransformer(str(folder), trust_remote_code=True, device="cpu")
    pairs = datasets.Dataset.from_dict({"anchor": TEXTS, "positive": [t.upper() for t in TEXTS]})

    def margin():
        first, second = (model.encode(list(pairs[name])) for name in ("anchor", "positive"))
        found = model.similarity(first, second).numpy()
        return np.diag(found).mean() - found.mean()

    before = margin()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library.SentenceTransformerTrainer(
            model,
            library.SentenceTransformerTrainingArguments(
                str(tmp_path / "runs"),
                max_steps=20,
                learning_rate=1e-3,
                report_to="none",
                save_strategy="no",
                use_cpu=True,
                disable_tqdm=True,
            ),
            pairs,
            loss=MultipleNegativesRankingLoss(model),
        ).train()
    assert margin() > before + 0.1
    model.save(str(tmp_path / "saved"))
    conversion.convert(tmp_path / "saved", "zeroclap", tmp_path / "back")
    back = model_folder.load_model(tmp_path / "back")
    assert np.allclose(vectors(back, "mean"), model.encode(TEXTS), atol=1e-5)
