"""DeepSpeed configurations: completed from the recipe, refused where they mislead."""

import json
from pathlib import Path

import pytest

from pretrain.config.deepspeed import DS_CONFIGS, check_same_state, compiles
from pretrain.config.sections import BatchConfig
from pretrain.engine import engine

BATCH = BatchConfig(global_batch_size=8, micro_batch_size=2)


@pytest.mark.parametrize("path", sorted(DS_CONFIGS.glob("*.json")), ids=lambda p: p.stem)
def test_every_shipped_configuration_takes_its_numbers_from_the_recipe(path):
    settings = engine.deepspeed_json(path.stem, BATCH, 1.5, 2)
    assert settings["train_batch_size"] == 8
    assert settings["train_micro_batch_size_per_gpu"] == 2
    assert settings["gradient_accumulation_steps"] == 2
    assert settings["gradient_clipping"] == 1.5
    stage, precision, *offload = path.stem.removeprefix("zero").split("_")
    assert settings["zero_optimization"]["stage"] == int(stage)
    for half in ("bf16", "fp16"):
        assert settings.get(half, {}).get("enabled", False) == (precision == half)
    assert ("offload_optimizer" in settings["zero_optimization"]) == bool(offload)
    assert "auto" not in json.dumps(settings)


@pytest.mark.parametrize(("ranks", "micro", "window"), [(8, 4, 128), (1, 512, 16384), (512, 1, 32)])
def test_the_loss_scale_of_fp16_grows_as_in_fairseq(ranks, micro, window):
    batch = BatchConfig(global_batch_size=512, micro_batch_size=micro)
    scale = engine.deepspeed_json("zero2_fp16", batch, 0.0, ranks)["fp16"]
    assert scale["initial_scale_power"] == 16  # of the mean loss; theirs is 2^7, of the sum
    assert scale["loss_scale_window"] == window
    assert scale["hysteresis"] == 1  # one overflow halves it


def completed(folder, settings):
    """The configuration of a file with these settings."""
    path = folder / "mine.json"
    path.write_text(json.dumps(settings))
    return engine.deepspeed_json(str(path), BATCH, 0.0, 2)


def zero(stage, **values):
    return {"zero_optimization": {"stage": stage, **values}}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"zero_optimisation": {"stage": 1}}, "zero_optimisation.; did you mean .zero_opti"),
        ({"zero_optimization": {"stge": 1}}, "zero_optimization: .* .stge.; did you mean .stage."),
        (zero(1) | {"bf16": {"enable": True}}, "bf16: .* .enable.; did you mean .enabled."),
        ({"optimizer": {"type": "AdamW"}}, "unknown key .optimizer.; known are bf16, "),
        ({"train_batch_size": 16}, "train_batch_size is 16, but the recipe, .* has 8"),
        ({"bf16": {"enabled": True}}, "bf16 with ZeRO stage 0"),
        ({"fp16": {"enabled": True}}, "fp16 with ZeRO stage 0"),
        *(
            (
                zero(stage, offload_optimizer={"device": "cpu"})
                | {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
                f"grad_accum_dtype fp32 with offload at ZeRO stage {stage} .* use stage 3",
            )
            for stage in (1, 2)
        ),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, "offloads nothing"),
        (zero(2, offload_optimizer={"devise": "cpu"}), "devise.; did you mean .device."),
        (zero(2, round_robin_gradients=True), "round_robin_gradients True: .* no other "),
        (zero(1, parameter_alignment=True), "padding between parameters"),
        (zero(1, load_from_fp32_weights=False), "each resume rounds the weights"),
        (zero(1, elastic_checkpoint=True), "does not load what it saves"),
        (zero(2, compute_grad_norm=False), "no norm of the gradient"),
        (zero(2, cpu_offload=True), "use offload_optimizer"),
        (zero(3, offload_optimizer={"device": "nvme"}), "cannot be committed; accepted: cpu"),
        (zero(3, offload_param={"device": "nvme"}), "offload_param.device nvme"),
        (zero(2, offload_param={"device": "cpu"}), "no weights at ZeRO stage 2; use stage 3"),
        (zero(3, cpu_offload_param=True), "use offload_param"),
        (zero(2, zenflow={"topk_ratio": 0.1}), "zenflow .* optimizers of its own"),
        (zero(3, offload_optimizer={"device": "cpu", "ratio": 0.5}), "ratio 0.5: .* of its own"),
        (zero(3, offload_optimizer={"super_offload": True}), "super_offload True: .* of its own"),
        (zero(4), "zero_optimization.stage: 4 is not accepted: "),
        (zero(2, offload_optimizer={"device": "gpu"}), "offload_optimizer.device: 'gpu' is not"),
        (zero(1) | {"fp16": {"hysteresis": "x"}}, "fp16.hysteresis: 'x' is not accepted"),
        (zero(1) | {"bf16": {"enabled": "auto"}}, "bf16.enabled: 'auto' .* true or false"),
        (zero(1) | dict.fromkeys(("bf16", "fp16"), {"enabled": True}), "both enabled"),
        ({"steps_per_print": 0}, "steps_per_print: 0 is not accepted; it must be above 0"),
        ({"communication_data_type": "fp33"}, "it must be one of fp32, bf16 or fp16"),
        (zero(3, offload_optimizer="nvme"), "offload_optimizer: 'nvme' .* a mapping of keys"),
        (zero(3, sub_group_size=100_000_000), "sub_group_size 100000000: .* remove it"),
        ({"data_types": {"grad_acum_dtype": "fp32"}}, "did you mean .data_types.grad_accum_dtype."),
        ({"checkpoint": {"load_universal": True}}, "unknown key .checkpoint."),
        ({"zero_optimization": 1}, "zero_optimization: 1 .* a mapping of keys"),
        (zero([1]), "stage: .1. is not accepted; it must be a whole number"),
        (zero(3, reduce_bucket_size=float("inf")), "reduce_bucket_size: inf is not accepted"),
        ([1], "is not a JSON object but list"),
    ],
)
def test_an_invalid_configuration_is_refused_by_name(settings, message, tmp_path):
    with pytest.raises(ValueError, match=message) as caught:
        completed(tmp_path, settings)
    assert str(tmp_path / "mine.json") in str(caught.value)


def test_auto_is_deepspeeds_own_default_in_its_zero_section(tmp_path):
    found = completed(tmp_path, zero(2, reduce_bucket_size="auto", overlap_comm="auto"))
    assert found["zero_optimization"] == {"stage": 2}


@pytest.mark.parametrize("part", [None, {}, {"device": "none"}])
@pytest.mark.parametrize(
    ("stage", "more"), [(0, {}), (1, {"data_types": {"grad_accum_dtype": "fp32"}})]
)
def test_an_offload_that_is_not_used_is_none(stage, more, part, tmp_path):
    unused = dict.fromkeys(("offload_optimizer", "offload_param"), part)
    found = completed(tmp_path, more | zero(stage, **unused))
    assert found["zero_optimization"].items() >= unused.items()


def test_a_configuration_may_repeat_numbers_of_the_recipe(tmp_path):
    found = completed(tmp_path, {"train_batch_size": 8, "gradient_clipping": "auto"})
    assert found["gradient_accumulation_steps"] == 2


def test_stage_3_keeps_the_optimizer_state_of_each_parameter_group_in_one_piece(tmp_path):
    """DeepSpeed's default splits what a rank has of a group at 10^9 elements."""
    read = engine.deepspeed_json("zero3_fp32", BATCH, 0.0, 2)
    assert read["zero_optimization"]["sub_group_size"] == 10**12
    for stage, size in [(3, 10**12), (2, 1000)]:  # stages 1 and 2 do not read it
        found = completed(tmp_path, zero(stage, sub_group_size=size))
        assert found["zero_optimization"]["sub_group_size"] == size


def test_a_configuration_that_does_not_exist_or_parse_is_refused(tmp_path):
    with pytest.raises(ValueError, match="'zero9' is neither a file nor one of zero0_fp32"):
        engine.deepspeed_json("zero9", BATCH, 0.0, 2)
    broken = Path(tmp_path / "broken.json")
    broken.write_text("{")
    with pytest.raises(ValueError, match="broken.json: is not valid JSON"):
        engine.deepspeed_json(str(broken), BATCH, 0.0, 2)


@pytest.mark.parametrize(
    ("before", "now", "message"),
    [
        ("zero1_fp32", "zero1_bf16", "bf16.enabled: False, now True"),
        ("zero1_fp32", "zero1_fp16", "fp16.enabled: False, now True"),
        ("zero1_fp32", "zero3_fp32", "zero_optimization.stage: 1, now 3"),
        ("zero2_bf16", "zero2_bf16_offload", "data_types.grad_accum_dtype: 'fp32', now None"),
    ],
)
def test_an_edited_configuration_that_changes_numbers_or_files_is_refused(before, now, message):
    saved, settings = (engine.deepspeed_json(name, BATCH, 0.0, 2) for name in (before, now))
    with pytest.raises(ValueError, match=f"mine.json differs .* checkpoint of step 30.*{message}"):
        check_same_state("mine.json", settings, saved, 30)


def test_a_configuration_may_change_where_the_numbers_and_files_stay():
    saved = engine.deepspeed_json("zero3_fp16", BATCH, 0.0, 2)
    settings = engine.deepspeed_json("zero3_fp16_offload", BATCH, 1.0, 1)
    settings["zero_optimization"] |= {"overlap_comm": False, "reduce_bucket_size": 1000}
    check_same_state("mine.json", settings | {"steps_per_print": 1}, saved, 30)
    settings["fp16"] |= {"fp16_master_weights_and_grads": True}
    with pytest.raises(ValueError, match="fp16_master_weights_and_grads: False, now True"):
        check_same_state("mine.json", settings, saved, 30)


@pytest.mark.parametrize(
    ("wanted", "stage", "on_gpu", "expected"),
    [
        ("auto", 1, True, True),
        ("auto", 1, False, False),
        ("auto", 3, True, False),
        (True, 2, False, True),
        (False, 2, True, False),
        (False, 3, True, False),
    ],
)
def test_a_gpu_compiles_unless_the_recipe_says_otherwise(wanted, stage, on_gpu, expected):
    settings = {"zero_optimization": {"stage": stage}}
    assert compiles(wanted, settings, on_gpu) is expected


def test_compiling_at_stage_3_is_refused():
    with pytest.raises(ValueError, match="training.compile: .* stage 3 .* use stage 2"):
        compiles(True, {"zero_optimization": {"stage": 3}}, on_gpu=True)
