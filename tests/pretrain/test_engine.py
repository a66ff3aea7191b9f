"""DeepSpeed as it really is, with ranks that really talk: one update, save, load."""

import dataclasses
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from pretrain import checkpoints, engine, optimizers
from pretrain.batches import PretrainingBatches
from pretrain.config import BatchConfig, FaultConfig, MaskingConfig, OptimizerConfig
from pretrain.deepspeed_settings import DS_CONFIGS
from pretrain.distributed import gather
from pretrain.model import presets
from pretrain.model.language_model import LanguageModel
from pretrain.objectives.masked import MaskedLM
from pretrain.order import Lineage, Segment

VOCABULARY = 101
LENGTH = 24
GLOBAL_BATCH = 8
LEARNING_RATES = [1e-3, 5e-4, 2e-3, 1e-3]
# A large epsilon makes the update smooth in the gradient, so that weights tell its error.
SMOOTH = OptimizerConfig(epsilon=1e-3, weight_decay=0.01)


class RandomBlocks:
    """Blocks of different lengths, without a corpus."""

    sequence_length = LENGTH

    def __len__(self):
        return 37

    def ids(self, block):
        draw = np.random.default_rng(block)
        return draw.integers(4, VOCABULARY - 1, draw.integers(LENGTH // 2, LENGTH + 1))


def batches(micro):
    return PretrainingBatches(
        RandomBlocks(),
        MaskedLM(MaskingConfig(), VOCABULARY - 1, VOCABULARY - 1),
        Lineage((Segment(0, 1),)),
        GLOBAL_BATCH,
        micro,
        FaultConfig(),
        1,
    )


def fresh_model(dropout):
    torch.manual_seed(1)
    overrides = {"dropout": dropout, "attention_dropout": dropout}
    return LanguageModel(presets.build("tiny", "zero-clap", VOCABULARY, overrides))


def build(name, micro, dropout=0.0, clipping=0.0, optimizer=SMOOTH):
    ranks = engine.start()
    batch = BatchConfig(global_batch_size=GLOBAL_BATCH, micro_batch_size=micro)
    settings = engine.deepspeed_json(name, batch, clipping, ranks.count)
    return engine.Engine(fresh_model(dropout), optimizer, settings, ranks)


def train(built, micro, steps):
    data = batches(micro)
    results = []
    for step in steps:
        mine = data.micro_batches(step, built.rank, built.ranks)
        rate = LEARNING_RATES[step % len(LEARNING_RATES)]
        results.append(built.step(mine, data.objective, rate, data.seed(step), step))
    return results


def save(built, run, step):
    checkpoints.save(run, step, {}, write=built.save, gather=gather, rank=built.rank)


def weights_of(run, step):
    folder = checkpoints.folder_of(run, step)
    checkpoints.read_manifest(folder)
    return engine.consolidated_weights(folder)


def assert_same_bits(left, right):
    assert left.keys() == right.keys()
    differing = [name for name in left if not torch.equal(left[name], right[name])]
    assert not differing


@pytest.fixture(scope="module")
def plain():
    """Three steps of an ordinary PyTorch loop: one process, the global batch in one pass."""
    model = fresh_model(0.0)
    adam = optimizers.build(model, SMOOTH)
    data, losses, norms = batches(GLOBAL_BATCH), [], []
    for step in range(3):
        (batch,) = data.micro_batches(step, 0, 1)
        tensors = {name: torch.from_numpy(array) for name, array in batch.arrays.items()}
        loss = data.objective.loss(model, tensors) / batch.targets
        adam.zero_grad()
        loss.backward()
        optimizers.set_step(adam.param_groups, SMOOTH, LEARNING_RATES[step], step)
        losses.append(loss.item())
        norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])))
        adam.step()
    return model.state_dict(), losses, norms


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_any_split_of_a_batch_trains_as_one_plain_pass_over_it(
    stage, ranks, plain, run_ranks, tmp_path
):
    """Law 4; micro-batches hold different numbers of masked tokens, accumulation is 4 or 2."""

    def work():
        built = build(f"zero{stage}_fp32", micro=2)
        results = train(built, 2, range(3))
        save(built, tmp_path, 3)
        return results

    reported = run_ranks(ranks, work)
    weights, losses, norms = plain
    assert all(results == reported[0] for results in reported)
    for result, loss, norm in zip(reported[0], losses, norms, strict=True):
        assert result.loss_sum / result.targets == pytest.approx(loss, abs=2e-6)
        assert result.gradient_norm == pytest.approx(norm, rel=2e-5)
    trained = weights_of(tmp_path, 3)
    assert trained.keys() == weights.keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(trained[name], tensor, rtol=0, atol=2e-6, msg=name)


@pytest.mark.parametrize(
    "name",
    [
        "zero0_fp32",
        "zero1_fp32",
        "zero1_bf16",
        "zero2_fp32",
        "zero2_bf16",
        "zero3_fp32",
        "zero3_bf16",
    ],
)
def test_stop_and_resume_gives_the_same_bits_as_not_stopping(name, run_ranks, tmp_path):
    """Law 2, with dropout and accumulation; optimiser states included."""

    def without_stop():
        built = build(name, micro=2, dropout=0.1)
        results = train(built, 2, range(2))
        save(built, tmp_path / "straight", 2)
        results += train(built, 2, range(2, 4))
        save(built, tmp_path / "straight", 4)
        return results

    def resumed():
        built = build(name, micro=2, dropout=0.1)
        built.load(checkpoints.folder_of(tmp_path / "straight", 2))
        results = train(built, 2, range(2, 4))
        save(built, tmp_path / "resumed", 4)
        return results

    straight = run_ranks(2, without_stop)[0]
    again = run_ranks(2, resumed)[0]
    assert again == straight[2:]
    assert all(np.isfinite(result.gradient_norm) for result in straight)
    assert_same_bits(weights_of(tmp_path / "resumed", 4), weights_of(tmp_path / "straight", 4))
    states = [
        torch.load(path, weights_only=False)
        for run in ("straight", "resumed")
        for path in sorted(checkpoints.folder_of(tmp_path / run, 4).glob("*optim_states.pt"))
    ]
    half = len(states) // 2
    assert half == (0 if "zero0" in name else 2)
    for left, right in zip(states[:half], states[half:], strict=True):
        assert_same_bits(dict(tensors_in(left)), dict(tensors_in(right)))


@pytest.mark.parametrize("name", ["zero1_fp32", "zero2_bf16", "zero3_fp32", "zero3_bf16"])
def test_no_uninitialised_memory_reaches_a_checkpoint(name, run_ranks, tmp_path):
    """ZeRO 3 pads what does not divide by the ranks, with memory as it was found."""

    def saved():
        torch.use_deterministic_algorithms(True)  # fills new memory with NaN
        built = build(name, micro=2)
        train(built, 2, range(2))
        save(built, tmp_path, 2)

    run_ranks(2, saved)
    paths = sorted(checkpoints.folder_of(tmp_path, 2).glob("*.pt"))
    tensors = [pair for path in paths for pair in tensors_in(torch.load(path, weights_only=False))]
    assert len(tensors) > 4
    assert [name for name, tensor in tensors if not tensor.isfinite().all()] == []


def tensors_in(value, path=""):
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from tensors_in(part, f"{path}/{key}")
    elif isinstance(value, list | tuple):
        for number, part in enumerate(value):
            yield from tensors_in(part, f"{path}/{number}")


def test_dropout_is_drawn_anew_each_step_and_seed(run_ranks):
    def work():
        built = build("zero1_fp32", micro=2, dropout=0.5)
        data = batches(2)
        mine = data.micro_batches(0, built.rank, built.ranks)
        # At learning rate 0 nothing but dropout can change the loss.
        return [
            built.step(mine, data.objective, 0.0, seed, step).loss_sum
            for seed, step in [(1, 0), (1, 0), (1, 1), (2, 0)]
        ]

    first, again, other_step, other_seed = run_ranks(2, work)[0]
    assert first == again
    assert len({first, other_step, other_seed}) == 3


def test_evaluation_is_without_dropout_and_leaves_training_as_it_was(run_ranks):
    def work():
        without = train(build("zero1_fp32", micro=2, dropout=0.1), 2, range(2))
        built = build("zero1_fp32", micro=2, dropout=0.1)
        data = batches(2)
        mine = data.micro_batches(5, built.rank, built.ranks)
        seen = [built.evaluate(mine, data.objective) for _ in range(2)]
        return seen, train(built, 2, range(2)), without

    seen, with_evaluation, without = run_ranks(2, work)[0]
    assert seen[0] == seen[1]
    assert with_evaluation == without
    targets = sum(b.targets for rank in range(2) for b in batches(2).micro_batches(5, rank, 2))
    assert seen[0][1] == targets


@pytest.mark.parametrize("name", ["zero0_fp32", "zero1_bf16", "zero2_fp32", "zero3_fp32"])
def test_consolidated_weights_are_those_that_the_ranks_train(name, run_ranks, tmp_path):
    def work():
        built = build(name, micro=4)
        result = train(built, 4, range(1))[0]
        save(built, tmp_path, 1)
        return result, masters(built._deepspeed)

    (result, expected), _ = run_ranks(2, work)
    assert np.isfinite(result.gradient_norm)
    consolidated = weights_of(tmp_path, 1)
    assert all(tensor.dtype == torch.float32 for tensor in consolidated.values())
    assert_same_bits(consolidated, expected)
    untrained = fresh_model(0.0).state_dict()
    assert all(not torch.equal(consolidated[n], untrained[n]) for n in untrained if "weight" in n)


def masters(deepspeed_engine):
    """The fp32 weights, asked of DeepSpeed a parameter at a time (a collective under ZeRO 3)."""
    from deepspeed.utils import safe_get_full_fp32_param

    return {
        name: (
            parameter
            if deepspeed_engine.zero_optimization_stage() == 0
            else safe_get_full_fp32_param(parameter)
        )
        .detach()
        .clone()
        for name, parameter in deepspeed_engine.module.named_parameters()
    }


def test_clipping_bounds_the_update_and_the_reported_norm_is_from_before(run_ranks, tmp_path):
    """With a huge epsilon Adam's update is the gradient over epsilon, so that its size shows."""
    linear = dataclasses.replace(SMOOTH, epsilon=1e3, weight_decay=0.0)

    def work():
        norms = []
        for clipping in (0.0, 0.01):
            built = build("zero1_fp32", micro=4, clipping=clipping, optimizer=linear)
            norms.append(train(built, 4, range(1))[0].gradient_norm)
            save(built, tmp_path / str(clipping), 1)
        return norms

    start = fresh_model(0.0).state_dict()
    norms, _ = run_ranks(2, work)
    moves = []
    for clipping in (0.0, 0.01):
        weights = weights_of(tmp_path / str(clipping), 1)
        moves.append(sum(float(((weights[n] - start[n]).double() ** 2).sum()) for n in start))
    assert norms[0] == norms[1] > 0.01
    assert (moves[0] / moves[1]) ** 0.5 == pytest.approx(norms[0] / 0.01, rel=0.05)


def test_start_up_compiles_no_op(run_ranks, tmp_path):
    import deepspeed.ops

    # The private table that `start` writes into: when DeepSpeed moves it, this tells.
    assert "deepspeed_shm_comm" in deepspeed.ops.__compatible_ops__

    def work():
        os.environ["TORCH_EXTENSIONS_DIR"] = str(tmp_path)
        train(build("zero1_fp32", micro=4), 4, range(1))
        from deepspeed.comm import comm

        return deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"], comm.cdb.get_world_size()

    assert run_ranks(2, work) == [(False, 2)] * 2
    assert list(tmp_path.iterdir()) == []


BATCH = BatchConfig(global_batch_size=8, micro_batch_size=2)


@pytest.mark.parametrize("path", sorted(DS_CONFIGS.glob("*.json")), ids=lambda p: p.stem)
def test_every_shipped_configuration_takes_its_numbers_from_the_recipe(path):
    settings = engine.deepspeed_json(path.stem, BATCH, 1.5, 2)
    assert settings["train_batch_size"] == 8
    assert settings["train_micro_batch_size_per_gpu"] == 2
    assert settings["gradient_accumulation_steps"] == 2
    assert settings["gradient_clipping"] == 1.5
    stage, precision = path.stem.removeprefix("zero").split("_")
    assert settings["zero_optimization"]["stage"] == int(stage)
    assert settings.get("bf16", {}).get("enabled", False) == (precision == "bf16")
    assert "auto" not in settings.values()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"zero_optimisation": {"stage": 1}}, "zero_optimisation; did you mean zero_optimization"),
        ({"zero_optimization": {"stge": 1}}, "zero_optimization: .* stge; did you mean stage"),
        (
            {"zero_optimization": {"stage": 1}, "bf16": {"enable": True}},
            "bf16: unknown .* enable; did you mean enabled",
        ),
        ({"fp16": {"initial_scale": 4}}, "fp16: .* did you mean initial_scale_power"),
        ({"optimizer": {"type": "AdamW"}}, "unknown DeepSpeed key optimizer"),
        ({"train_batch_size": 16}, "train_batch_size is 16, the recipe's is 8"),
        ({"gradient_clipping": 2.0}, "gradient_clipping is 2.0, the recipe's is 0.0"),
        ({"bf16": {"enabled": True}}, "bf16 with ZeRO stage 0"),
        ({"bf16": {"enabled": True}, "zero_optimization": {"stage": 0}}, "bf16 with ZeRO stage 0"),
    ],
)
def test_a_deepspeed_json_that_is_wrong_is_refused_by_name(settings, message, tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=message) as caught:
        engine.deepspeed_json(str(path), BATCH, 0.0, 2)
    assert str(path) in str(caught.value)


def test_a_deepspeed_json_may_repeat_what_the_recipe_says(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"train_batch_size": 8, "gradient_clipping": "auto"}))
    assert engine.deepspeed_json(str(path), BATCH, 0.0, 2)["gradient_accumulation_steps"] == 2


def test_a_deepspeed_json_that_does_not_exist_or_parse_is_refused(tmp_path):
    with pytest.raises(ValueError, match="'zero9' is no file, nor one of zero0_fp32"):
        engine.deepspeed_json("zero9", BATCH, 0.0, 2)
    broken = Path(tmp_path / "broken.json")
    broken.write_text("{")
    with pytest.raises(ValueError, match="broken.json: is no JSON"):
        engine.deepspeed_json(str(broken), BATCH, 0.0, 2)


def test_ranks_that_do_not_divide_the_batch_are_refused():
    with pytest.raises(ValueError, match="global_batch_size 8 is not a multiple of .* 2 x 3 ranks"):
        engine.deepspeed_json("zero1_fp32", BATCH, 0.0, 3)
