"""fairseq checkpoints: fairseq's numbers, older layouts, and what is refused."""

import argparse
import itertools
import json
import os
import pickle
import re
import shutil
import zipfile
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from torch.nn.functional import cross_entropy

from data_prep.tokenizer import Tokenizer
from finetune.zeroclap import main
from pretrain.convert import fairseq
from pretrain.convert.model_folder import build, load_model
from pretrain.convert.weights import renamed, separated
from pretrain.convert.writing import save_model
from pretrain.inference.pretrained import Pretrained
from pretrain.model.classification import ClassificationConfig, ClassificationHead
from tests.pretrain.builders import Trap
from tests.pretrain.convert.conftest import close, our_logits
from tests.pretrain.convert.contents import random_contents

ENCODER, LM_HEAD = "encoder.sentence_encoder.", "encoder.lm_head."
TOKENS = ENCODER + "embed_tokens.weight"
CLASSES = {"topic": 3, "score": 1}
HEADS = {name: ClassificationConfig(classes, dropout=0.2) for name, classes in CLASSES.items()}
SETTINGS = {
    "baseline": {"dropout": 0.0, "pooler_dropout": 0.2},
    "zero-clap": {
        **{"dropout": 0.0, "no_token_positional_embeddings": True, "encoder_alibi": True},
        **{"encoder_alibi_asymmetrical": True, "contrastive_pretraining": True},
        **{"initial_beta": 2.5, "no_scale_embedding": False, "layernorm_embedding": False},
        "zero_masking": True,
    },
}
"""What fairseq's settings of a variant have besides sizes; others have their defaults."""


def write(path, variant, heads=None, rows=50):
    """Write a checkpoint of a tiny model with random weights, and return our contents of it.

    `heads` are further classification heads.
    """
    fields = {"dropout": 0.0, "max_positions": 17}
    fields |= {"initial_beta": 2.5} if variant == "zero-clap" else {}
    contents = random_contents(variant, None, rows=rows, scale=1.0, **fields)
    weights = separated(contents.weights, renamed(contents.weights, fairseq._MODULES))
    for name, head in (heads or {}).items():
        for key, weight in ClassificationHead(32, head).state_dict().items():
            key = key.replace("projection", "out_proj")
            weights[f"classification_heads.{name}.{key}"] = weight
    weights |= {ENCODER + "version": torch.tensor([3.0]), LM_HEAD + "weight": weights[TOKENS]}
    sizes = {theirs: getattr(contents.config, ours) for ours, theirs in fairseq._SIZES.items()}
    model = {**sizes, "activation_fn": "gelu", "attention_dropout": 0.1, **SETTINGS[variant]}
    checkpoint = {"args": None, "cfg": {"model": model}, "model": weights, "extra_state": {}}
    torch.save({**checkpoint, "optimizer_history": [{"num_updates": 7}]}, path)
    return contents


@pytest.fixture
def path(tmp_path):
    """A checkpoint of a tiny RoBERTa with classification heads."""
    write(tmp_path / "tiny.pt", "baseline", HEADS)
    return tmp_path / "tiny.pt"


def content(path):
    return torch.load(path, weights_only=True)


def change(path, settings=(), weights=()):
    """Change the checkpoint's settings of the model, or its weights; None takes one out."""
    checkpoint = content(path)
    model = {**checkpoint["cfg"]["model"], **dict(settings)}
    checkpoint["cfg"]["model"] = {k: v for k, v in model.items() if v is not None}
    changed = {**checkpoint["model"], **dict(weights)}
    checkpoint["model"] = OrderedDict((k, v) for k, v in changed.items() if v is not None)
    torch.save(checkpoint, path)


def refusal(path, *arguments):
    """The message of a refused file: it is short, names the file, and nothing is written."""
    before = sorted(path.parent.rglob("*"))
    with pytest.raises(ValueError, match=path.name) as caught:
        fairseq.read_checkpoint(path, *arguments)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert len(message.removeprefix(str(path))) < 400
    assert message.count("\n") < 2
    assert sorted(path.parent.rglob("*")) == before
    return message


@torch.no_grad()
def logits_of(contents, ids):
    """Logits at every place, with `<pad>` as padding; without that of a mask that has no row."""
    logits, _ = our_logits(build(Path(), contents), ids, ids != 1)
    return logits[..., : contents.config.vocab_size]


def same(one, other):
    assert one.config == other.config
    assert one.classifier == other.classifier
    assert one.weights.keys() == other.weights.keys()
    assert all(torch.equal(one.weights[name], other.weights[name]) for name in one.weights)
    return True


# --- fairseq's numbers --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["baseline_pile", "zero_clap_pile"])
@torch.no_grad()
def test_a_checkpoint_of_eify_fairseq_gives_its_logits_and_loss(name, shared):
    contents = fairseq.read_checkpoint(shared / f"golden/checkpoints/{name}.pt")
    facts = json.loads((shared / "golden/checkpoints/layout.json").read_text())[name]["golden"]
    expected = load_file(shared / f"golden/checkpoints/{name}.golden.safetensors")
    ids, labels = expected["in.src_tokens"], expected["in.target"].flatten()
    logits = logits_of(contents, ids)
    close(logits, expected["out.logits"])
    close(build(Path(), contents).model.encoder(ids, ids != 1), expected["out.features"])
    loss = cross_entropy(logits.flatten(0, 1), labels, ignore_index=1, reduction="sum")
    assert loss.item() == pytest.approx(expected["out.loss_sum"].item(), abs=1e-4)
    assert contents.config.vocab_size == facts["vocab"]
    assert contents.provenance == {"source": f"{name}.pt", "format": "fairseq", "updates": 3}


@pytest.mark.parametrize(("name", "classes"), [("cls3-baseline", 3), ("reg1-baseline", 1)])
@torch.no_grad()
def test_classification_heads_give_fairseq_s_logits(name, classes, golden, tmp_path):
    tensors = load_file(golden / f"{name}.safetensors")
    arguments = json.loads((golden / f"{name}.json").read_text())["model_args"]
    weights = {k.removeprefix("model."): v for k, v in tensors.items() if k.startswith("model.")}
    settings = {"cfg": {"model": {**arguments, "pooler_dropout": 0.3}}}
    torch.save({**settings, "model": weights}, tmp_path / "golden.pt")
    head = "sentence_classification_head"
    contents = fairseq.read_checkpoint(tmp_path / "golden.pt", None, head)
    assert contents.classifier == ClassificationConfig(classes, dropout=0.3)
    ids = tensors["in.src_tokens"]
    logits, _ = our_logits(build(tmp_path, contents), ids, ids != 1)
    close(logits, tensors["out.cls_logits"])


# --- settings and layouts -----------------------------------------------------------------------


@pytest.mark.parametrize("variant", SETTINGS)
def test_settings_weights_and_heads_are_those_of_the_model(variant, tmp_path):
    contents = write(tmp_path / "model.pt", variant, HEADS)
    found = fairseq.read_checkpoint(tmp_path / "model.pt")
    assert same(found, contents)
    assert found.provenance == {"source": "model.pt", "format": "fairseq", "updates": 7}


def as_of_2019(path):
    """Rewrite a RoBERTa checkpoint as fairseq wrote them before its settings were a mapping."""
    checkpoint = content(path)
    weights, renamed = checkpoint["model"], {}
    for name, weight in weights.items():
        part = re.fullmatch(r"(.*self_attn\.)[qkv]_proj\.(weight|bias)", name)
        if part:
            joined = torch.cat([weights[f"{part[1]}{letter}_proj.{part[2]}"] for letter in "qkv"])
            renamed[f"{part[1]}in_proj_{part[2]}"] = joined
        else:
            renamed[name.replace(".layernorm_embedding.", ".emb_layer_norm.")] = weight
    arguments = checkpoint["cfg"]["model"]
    old = {
        "args": argparse.Namespace(**arguments, arch="roberta_base", lr=[0.1], data=None),
        "model": {"decoder" + name.removeprefix("encoder"): w for name, w in renamed.items()},
    }
    torch.save(old, path, _use_new_zipfile_serialization=False)


def test_an_old_roberta_with_a_namespace_and_other_names_is_the_same_model(tmp_path):
    path = tmp_path / "old.pt"
    write(path, "baseline")
    new = fairseq.read_checkpoint(path)
    as_of_2019(path)
    assert same(fairseq.read_checkpoint(path), new)
    assert fairseq.read_checkpoint(path).provenance["updates"] is None


def test_settings_that_fairseq_lacks_default_to_its_roberta(shared, tmp_path):
    path = Path(shutil.copy(shared / "golden/checkpoints/baseline_pile.pt", tmp_path))
    given = fairseq.read_checkpoint(path)
    names = ["encoder_alibi", "encoder_alibi_asymmetrical", "contrastive_pretraining"]
    names += ["zero_masking", "mask_prob", "initial_beta", "l2norm_embedding"]
    names += ["no_scale_embedding", "layernorm_embedding", "encoder_learned_pos"]
    change(path, dict.fromkeys(names))
    assert same(fairseq.read_checkpoint(path), given)


# --- vocabularies -------------------------------------------------------------------------------


def vocabulary(made_up):
    """Bytes, then `made_up` madeupwords, as in the published dictionaries."""
    first = ["<s>", "<pad>", "</s>", "<unk>"]
    words = [*first, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words += [f"madeupword{number:04}" for number in range(made_up)]
    backend = Backend(models.BPE({word: id for id, word in enumerate(words)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([*first, "<mask>"])
    return Tokenizer(backend)


def test_missing_madeupwords_of_a_published_model_are_masks(tmp_path):
    ids = vocabulary(made_up=3)
    assert (ids.vocab_size, ids.mask_id) == (264, 263)
    write(tmp_path / "model.pt", "zero-clap", rows=262)
    contents = fairseq.read_checkpoint(tmp_path / "model.pt", ids)
    assert contents.config.vocab_size == 261
    loaded = build(Path(), contents)
    model = loaded.model
    vectors = model.encoder.embeddings(torch.tensor([[0, 261, 262, 263]]), None)
    assert vectors[0, 0].abs().sum() > 0
    assert torch.equal(vectors[0, 1:], torch.zeros(3, 32))
    (fillers,) = Pretrained(loaded, "cpu").fill_mask("a <mask> b", top_k=261)
    assert sum(filler.probability for filler in fillers) == pytest.approx(1.0, abs=1e-4)
    # Today's EIFY/fairseq, without the two words in its dictionary, has mask id 261.
    text = torch.tensor([[0, 70, 263, 71, 2]])
    assert torch.equal(logits_of(contents, text), logits_of(contents, text.clamp(max=261)))


@pytest.mark.parametrize(
    ("variant", "size", "made_up", "fits"),
    [
        ("baseline", 264, 3, True),
        ("zero-clap", 264, 3, True),
        ("baseline", 262, 3, False),  # rows too few, though only madeupwords lack one
        ("baseline", 265, 3, False),
        ("zero-clap", 260, 3, False),  # a byte lacks a row
        ("zero-clap", 265, 3, False),  # a row for the mask
    ],
)
def test_a_vocabulary_fits_or_is_refused_with_the_numbers(variant, size, made_up, fits, tmp_path):
    path, words = tmp_path / "model.pt", vocabulary(made_up)
    write(path, variant, rows=size)
    rows = size - (variant == "zero-clap")
    if fits:
        contents = fairseq.read_checkpoint(path, words)
        assert contents.config.vocab_size == rows
        save_model(tmp_path / "folder", contents)
        assert load_model(tmp_path / "folder").tokenizer.vocab_size == words.vocab_size
        return
    message = refusal(path, words)
    assert f"{rows} rows does not fit the vocabulary of {words.vocab_size} ids" in message
    assert f"accepted: one of {size}," in message


# --- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize("archive", [True, False], ids=["zip archive", "as before torch 1.6"])
@pytest.mark.parametrize("place", ["model", "cfg", "args", "extra_state"])
def test_a_checkpoint_cannot_run_code(place, archive, path, tmp_path):
    sprung = tmp_path / "sprung"
    checkpoint = {**content(path), place: Trap(sprung)}
    torch.save(checkpoint, path, _use_new_zipfile_serialization=archive)
    assert f"{os.mkdir.__module__}.mkdir" in refusal(path)
    assert not sprung.exists()
    pickle.loads(pickle.dumps(Trap(sprung)))
    assert sprung.exists(), "the trap itself must work"


def compressed(path):
    """An archive whose weights are written in fewer bytes than they have."""
    with zipfile.ZipFile(path) as archive:
        entries = {entry: archive.read(entry) for entry in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in entries.items():
            archive.writestr(name, data + bytes(10**6))


OTHERS = [b"", b"hello\n", b"\x80\x02.", b"PK\x03\x04", json.dumps({"model": {}}).encode()]


@pytest.mark.parametrize(
    ("damage", "archive"),
    [
        *((damage, True) for damage in (compressed, *OTHERS)),
        *itertools.product((0.01, 0.5, 0.999), (True, False)),  # False: as before torch 1.6
    ],
)
def test_a_file_that_is_damaged_or_something_else_is_refused(damage, archive, path):
    torch.save(content(path), path, _use_new_zipfile_serialization=archive)
    if damage is compressed:
        compressed(path)
    else:
        whole = path.read_bytes()
        path.write_bytes(damage if isinstance(damage, bytes) else whole[: int(damage * len(whole))])
    assert "is not a file of torch.save, or is cut short or damaged" in refusal(path)


def test_a_flipped_bit_in_any_weight_or_in_the_settings_is_refused(path):
    whole = path.read_bytes()
    parts = [bytes(w.numpy().tobytes()) for w in content(path)["model"].values() if w.numel() > 9]
    for part in [*parts, b"encoder_attention_heads"]:
        damaged = bytearray(whole)
        start = whole.index(part)
        damaged[start + len(part) // 2] ^= 1
        path.write_bytes(damaged)
        assert "cut short or damaged" in refusal(path)


ONE_LAYER = {"cfg": {"model": {"encoder_layers": 1}}}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        *(([1, 2], "holds no fairseq"), (torch.zeros(3), "holds no fairseq")),
        *(({}, "holds no settings"), ({"cfg": 3, "args": None}, "holds no settings")),
        ({"cfg": {"model": None}}, "holds no settings"),
        *(({"model": wrong, **ONE_LAYER}, "holds no fairseq") for wrong in (3, {"a": 1}, {1: 2})),
        ({"model": {"a": torch.zeros(2)}, **ONE_LAYER}, "holds no RoBERTa"),
        ({"model": {TOKENS: torch.zeros(2)}, **ONE_LAYER}, "holds no RoBERTa"),
    ],
)
def test_a_file_of_torch_that_holds_something_else_is_refused(content, message, tmp_path):
    torch.save(content, tmp_path / "other.pt")
    assert message in refusal(tmp_path / "other.pt")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("activation_fn", "relu", "activation_fn: 'relu'"),
        ("encoder_layers_to_keep", "0", "encoder_layers_to_keep: '0'"),
        ("untie_weights_roberta", True, "untie_weights_roberta: True"),
        ("vae_beta", 0.5, "vae_beta: 0.5"),
        ("pooler_activation_fn", "relu", "pooler_activation_fn: 'relu'"),
        # of the wrong type, out of bounds, or missing
        ("contrastive_pretraining", "yes", "contrastive_pretraining: 'yes'"),
        ("dropout", "much", "dropout: 'much'"),
        ("attention_dropout", 2.0, "attention_dropout: 2.0"),
        ("encoder_attention_heads", None, "lack encoder_attention_heads"),
        # contradicted by another setting, or by the weights, of which each leaves another set
        ("encoder_alibi", True, "encoder_alibi: True"),
        ("encoder_layers", 1, "do not fit the settings; left over"),
        ("encoder_layers", 3, "and 13 more"),
        ("encoder_embed_dim", 2**23, "[50, 32] instead of [50, 8388608]"),
        ("encoder_learned_pos", False, "do not fit the settings"),
        ("contrastive_pretraining", True, "do not fit the settings"),
    ],
)
def test_settings_of_another_model_are_refused_by_name(name, value, message, path):
    change(path, {name: value})
    assert message in refusal(path, None, "topic" if name.startswith("pooler") else "")


LAYER, HEAD = ENCODER + "layers.1.", "classification_heads.topic."


@pytest.mark.parametrize(
    ("name", "weight", "fault"),
    [
        (LAYER + "fc1.weight", None, "missing: "),
        (LAYER + "extra.weight", torch.zeros(2), "left over: "),
        (LAYER + "fc1.weight", torch.zeros(32, 64), "wrong shape: "),
        (LAYER + "fc1.bias", torch.zeros(64, dtype=torch.int64), "not floating point: "),
        (LAYER + "fc1.bias", torch.full((64,), float("nan")), "not finite: "),
        (HEAD + "out_proj.weight", None, "missing: "),
        (HEAD + "out_proj.weight", torch.tensor(1.0), "wrong shape: "),
        (LM_HEAD + "weight", torch.zeros(50, 32), ""),  # not tied to the tokens
    ],
)
def test_a_weight_that_does_not_fit_is_named(name, weight, fault, path):
    change(path, weights={name: weight})
    named = name.replace("classification_heads.topic", "classifier")
    assert fault + named in refusal(path, None, "topic" if named != name else "")


# --- the command ---------------------------------------------------------------------------------


def test_a_checkpoint_becomes_a_folder_that_every_command_reads(tmp_path, capsys):
    checkpoint, words = tmp_path / "model.pt", tmp_path / "tokenizer.json"
    write(checkpoint, "zero-clap", rows=264)
    vocabulary(made_up=3).save(words)
    command = ["import", str(checkpoint), "--output"]
    assert main([*command, str(tmp_path / "model"), "--tokenizer", str(words)]) == 0
    assert "ZeroclapForMaskedLM in Python: AutoModelForMaskedLM" in capsys.readouterr().out
    assert main(["fill-mask", str(tmp_path / "model"), "a <mask>"]) == 0
    assert main([*command, str(tmp_path / "without")]) == 0
    assert "reads ids, not text (--tokenizer names one)" in capsys.readouterr().out


def test_a_checkpoint_with_classification_heads_becomes_one_model_or_the_other(path, capsys):
    command = ["import", str(path), "--output"]
    words, topic = path.parent / "words", path.parent / "topic"
    assert main([*command, str(words)]) == 0
    assert "classification heads were left out: score, topic (--head)" in capsys.readouterr().out
    assert load_model(words).classifier is None
    assert main([*command, str(topic), "--head", "topic"]) == 0
    loaded = load_model(topic)
    assert (loaded.classifier.config, loaded.contents.has_head) == (HEADS["topic"], False)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "nowhere: no such file; accepted: a fairseq checkpoint"),
        (["taken"], "taken: is a folder; accepted: a fairseq checkpoint"),
        (["tiny.pt", "--tokenizer", "no-words"], "no-words"),
        (["tiny.pt", "--head", "none"], "has no classification head 'none'; it has score, topic"),
        (["tiny.pt", "--output", "taken"], "taken"),
    ],
)
def test_wrong_inputs_are_refused_in_one_line_and_nothing_is_written(
    words, message, path, capsys, monkeypatch
):
    monkeypatch.chdir(path.parent)
    (path.parent / "taken").mkdir()
    (path.parent / "taken" / "file").write_text("theirs")
    before = sorted(path.parent.rglob("*"))
    output = [] if "--output" in words else ["--output", "out"]
    assert main(["import", *words, *output]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) <= 2
    assert (path.parent / "taken" / "file").read_text() == "theirs"
    assert sorted(path.parent.rglob("*")) == before
