"""The models that a command line names, and the checks of model folders."""

import pytest

from finetune.birthplaces.models import (
    VARIANTS,
    Choice,
    load,
    refuse_existing,
    refuse_overrides,
    variant_of,
)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_has_a_recipe_of_a_causal_model(variant):
    config = Choice(variant).config()
    architecture = config.architecture(256)
    assert architecture.causal
    assert variant_of(architecture) == variant
    assert architecture.latents == (0 if variant == "vanilla" else 32)
    assert architecture.max_positions == config.data.sequence_length == 128


def test_the_bottleneck_and_the_position_method_are_the_command_lines():
    assert Choice("perceiver", 64).config().architecture(256).latents == 64
    for variant in VARIANTS:
        architecture = Choice(variant, None, "rotary").config().architecture(256)
        assert architecture.position == "rotary"
    assert Choice("vanilla").config(["model.size=tiny"]).architecture(256).num_layers == 2


@pytest.mark.parametrize(
    ("variant", "size", "reason"),
    [
        ("vanilla", 32, "has a meaning for perceiver only"),
        ("perceiver", 0, "accepted: 1 to 127"),
        ("perceiver", 128, "accepted: 1 to 127"),
    ],
)
def test_a_bottleneck_of_no_use_is_refused(variant, size, reason):
    with pytest.raises(ValueError, match=f"--bottleneck_dim {size}: {reason}"):
        Choice(variant, size)


@pytest.mark.parametrize(
    ("override", "accepted", "reason"),
    [
        ("folder=a", None, "use --tb_expt_name, which sets folder"),
        ("data.corpus=a", None, "use the argument corpus"),
        ("training.steps=3", None, "use --epochs"),
        ("training.seed=3", ["optimizer"], "use --seed"),
        ("model.variant=char-perceiver", None, "use the argument variant"),
        ("optimizer.learning_rate=1", ["optimizer"], "use --pretrain_lr or --finetune_lr"),
        ("training={steps: 3}", None, "a whole section; write training.NAME=value"),
        ("batch.micro_batch_size=3", ["optimizer"], "no effect here; only settings of optimizer"),
        ("steps", None, "is not an override"),
    ],
)
def test_settings_that_contradict_an_option_or_have_no_effect_are_refused(
    override, accepted, reason
):
    with pytest.raises(ValueError, match=reason):
        refuse_overrides([override], accepted)
    refuse_overrides(["optimizer.beta1=0.8"], accepted)


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (Choice("vanilla"), "variant vanilla: the model in"),
        (Choice("perceiver", 16), "--bottleneck_dim 16: the model in"),
    ],
)
def test_a_folder_of_another_model_is_refused(make_model, task, tmp_path, choice, message):
    folder = make_model(Choice("perceiver", 8), tmp_path / "model")
    assert load(folder, Choice("perceiver"), task.text).model.config.latents == 8
    with pytest.raises(ValueError, match=message):
        load(folder, choice, task.text)


def test_a_folder_of_another_position_method_is_refused(make_model, task, tmp_path):
    folder = make_model(Choice("vanilla"), tmp_path / "model")
    with pytest.raises(ValueError, match="--position rotary: .* has learned"):
        load(folder, Choice("vanilla", None, "rotary"), task.text)


def test_a_folder_of_another_text_is_refused(make_model, tmp_path):
    folder = make_model(Choice("vanilla"), tmp_path / "model")
    (tmp_path / "other.txt").write_text("xyz")
    with pytest.raises(ValueError, match="other.txt: its vocabulary of .* ids is not that of"):
        load(folder, Choice("vanilla"), tmp_path / "other.txt")


def test_an_output_that_exists_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    refuse_existing(tmp_path / "empty")
    refuse_existing(tmp_path / "new", is_file=True)
    (tmp_path / "file").touch()
    cases = [(tmp_path, False), (tmp_path / "file", False), (tmp_path / "empty", True)]
    for path, is_file in cases:
        with pytest.raises(ValueError, match=f"{path}: exists"):
            refuse_existing(path, is_file=is_file)


def test_an_output_that_could_not_be_written_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    refuse_existing(tmp_path / "new" / "model")
    below = tmp_path / "file" / "new" / "model"
    with pytest.raises(ValueError, match=f"{below}: {tmp_path}/file is not a folder"):
        refuse_existing(below)
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write everywhere
    with pytest.raises(ValueError, match=f"model: {tmp_path} may not be written to"):
        refuse_existing(tmp_path / "model")
