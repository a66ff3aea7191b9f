"""A trained model on the GPU: export, evaluation, mask filling, fine-tuning and prediction."""

import json

import pytest

from tests.finetune.conftest import tiny_model  # noqa: F401 - a fixture
from tests.gpu.conftest import finish, run

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="module")
def model(begin, device, tmp_path_factory):
    """A model that was trained on the device, and exported."""
    folder = tmp_path_factory.mktemp("trained")
    finish(begin(folder / "run", "training.deepspeed=zero1_bf16", "model.overrides.dropout=0.0"))
    run("pretrain", "export", folder / "run", "--output", folder / "model")
    return folder / "model"


def test_an_exported_model_has_the_cpu_s_perplexity(model, corpus, device, tmp_path):
    found = []
    for name in (device.type, "cpu"):
        words = ["--data", corpus, "--blocks", 8, "--device", name]
        run("pretrain", "evaluate", model, *words, "--json", tmp_path / "scores.json")
        (scores,) = json.loads((tmp_path / "scores.json").read_text())
        found.append(scores["total"]["loss"])
    ours, cpu = found
    assert ours == pytest.approx(cpu, abs=1e-3)


def test_masks_are_filled_as_on_the_cpu(model, device):
    ours, cpu = (
        [
            line.split()[:2]
            for line in run(
                "pretrain", "fill-mask", model, "The <mask> statement", "--device", name
            ).splitlines()
        ]
        for name in (device.type, "cpu")
    )
    assert len(ours) == len(cpu) == 5
    for (probability, token), (expected, expected_token) in zip(ours, cpu, strict=True):
        assert float(probability) == pytest.approx(float(expected), abs=1e-3)
        assert token == expected_token


def test_glue_is_learned_on_the_device_and_predicted_alike(
    tiny_model,  # noqa: F811 - a fixture
    easy_glue,
    device,
    tmp_path,
):
    """In bf16, which is the default of fine-tuning on a GPU."""
    settings = ["epochs=6", "learning_rate=1e-2", "pooling=mean", "dropout=0"]
    words = ["--tasks", "CoLA", "--output", tmp_path / "scores", *settings]
    run("finetune", "glue", tiny_model, "--data", easy_glue, *words, "deepspeed=zero1_bf16")
    folder = tmp_path / "scores" / "CoLA-pretrained-seed1"
    result = json.loads((folder / "result.json").read_text())
    assert result["device"] == ("cuda:0" if device.type == "cuda" else "cpu")
    assert result["best"]["accuracy"] > 0.9
    (tmp_path / "new.tsv").write_text("the old dog sees a wug\nthe small bird runs near\n")
    for name in (device.type, "cpu"):
        lines = run("finetune", "predict", folder / "model", tmp_path / "new.tsv", "--device", name)
        assert [line.split("\t")[0] for line in lines.splitlines()[-2:]] == ["0", "1"]
