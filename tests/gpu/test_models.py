"""A trained model on the GPU: export, evaluation, mask filling, fine-tuning and prediction."""

import json

import pytest
import torch

from finetune import graphs
from pretrain.model import presets
from pretrain.model.classification import ClassificationConfig, ClassificationHead, Classifier
from pretrain.model.language_model import LanguageModel
from tests.gpu.conftest import finish, run

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="module")
def model(begin, device, tmp_path_factory):
    """A model that was trained on the device, and exported."""
    folder = tmp_path_factory.mktemp("trained")
    finish(begin(folder / "run", "training.deepspeed=zero1_bf16", "model.overrides.dropout=0.0"))
    run("finetune.zeroclap", "export", folder / "run", "--output", folder / "model")
    return folder / "model"


def test_an_exported_model_has_the_cpu_s_perplexity(model, corpus, device, tmp_path):
    found = []
    for name in (device.type, "cpu"):
        words = ["--data", corpus, "--blocks", 8, "--device", name]
        run("finetune.zeroclap", "evaluate", model, *words, "--json", tmp_path / "scores.json")
        (scores,) = json.loads((tmp_path / "scores.json").read_text())
        found.append(scores["total"]["loss"])
    ours, cpu = found
    assert ours == pytest.approx(cpu, abs=1e-3)


def test_masks_are_filled_as_on_the_cpu(model, device):
    ours, cpu = (
        [
            line.split()[:2]
            for line in run(
                "finetune.zeroclap", "fill-mask", model, "The <mask> statement", "--device", name
            ).splitlines()
        ]
        for name in (device.type, "cpu")
    )
    assert len(ours) == len(cpu) == 5
    for (probability, token), (expected, expected_token) in zip(ours, cpu, strict=True):
        assert float(probability) == pytest.approx(float(expected), abs=1e-3)
        assert token == expected_token


def test_glue_is_learned_on_the_device_and_predicted_alike(tiny_model, easy_glue, device, tmp_path):
    """In bf16, which is the default of fine-tuning on a GPU."""
    settings = ["epochs=6", "learning_rate=1e-2", "pooling=mean", "dropout=0"]
    words = ["--tasks", "CoLA", "--output", tmp_path / "scores", *settings, "deepspeed=zero1_bf16"]
    run("finetune.zeroclap", "glue", tiny_model, "--data", easy_glue, *words)
    folder = tmp_path / "scores" / "CoLA-pretrained-seed1"
    result = json.loads((folder / "result.json").read_text())
    assert result["device"] == ("cuda:0" if device.type == "cuda" else "cpu")
    assert result["best"]["accuracy"] > 0.9
    (tmp_path / "new.tsv").write_text("the old dog sees a wug\nthe small bird runs near\n")
    words = ["predict", folder / "model", tmp_path / "new.tsv", "--device"]
    for name in (device.type, "cpu"):
        lines = run("finetune.zeroclap", *words, name)
        assert [line.split("\t")[0] for line in lines.splitlines()[-2:]] == ["0", "1"]


@pytest.mark.parametrize("variant", ["baseline", "zero-clap"])
def test_graphs_have_the_bits_of_the_passes_that_they_replay(variant, device, monkeypatch):
    """With dropout of a generator that is seeded before each batch, as the engine does."""
    if device.type == "cpu":
        pytest.skip("a GPU's feature")

    def batches():
        torch.manual_seed(0)
        architecture = presets.build("small", variant, 320, {})
        head = ClassificationHead(architecture.hidden_size, ClassificationConfig(2))
        classifier = Classifier(LanguageModel(architecture).encoder, head)
        graphs.replay_passes(classifier.to(device, torch.bfloat16).train())
        for seed, length in enumerate([20, 40, 20, 25, 40]):
            torch.cuda.manual_seed(seed)
            ids = torch.arange(4 * length, device=device).view(4, length)
            logits = classifier(
                ids, ids % length < length - torch.arange(4, device=device)[:, None]
            )
            classifier.zero_grad()
            logits.float().square().sum().backward()
            logits = logits.detach()  # a graph that lives on fails the next capture
            gradients = [p.grad.clone() for p in classifier.parameters() if p.grad is not None]
            yield [logits.clone(), *gradients]

    replayed = list(batches())
    monkeypatch.setattr(graphs, "_capture", lambda module, inputs, pool: module)
    assert not torch.equal(replayed[0][0], replayed[2][0])  # dropout of another seed
    for ours, theirs in zip(replayed, batches(), strict=True):
        assert [torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)] == [True] * len(ours)
