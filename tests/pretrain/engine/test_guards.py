"""The guards: their formulas, and what they do between DeepSpeed and the optimizer."""

import math

import numpy as np
import pytest
import torch

from pretrain.config.sections import OptimizerConfig
from pretrain.engine import by_parameter, distributed, engine, guards, optimizers
from pretrain.records import checkpoints
from tests.pretrain.builders import save_engine, slow
from tests.pretrain.engine import test_engine as engines

GUARDS = ["skip-step", "zclip"]
RATE = 1e-3


def fold(guard, norms, losses=None):
    """The factors of a sequence of measurements."""
    state, factors = {}, []
    for norm, loss in zip(norms, losses or [1.0] * len(norms), strict=True):
        state, factor = guard(state, norm, loss)
        factors.append(factor)
    return factors


def noise(number, seed=1):
    return (3.0 + 0.1 * np.random.default_rng(seed).normal(size=number)).tolist()


@pytest.mark.parametrize("what", ["norms", "losses"])
def test_skip_step_leaves_out_what_is_six_deviations_above_the_last_128(what):
    """Compared with torch's mean and deviation, around the threshold."""
    quiet = noise(200)
    deviation, mean = torch.std_mean(torch.tensor(quiet[-128:], dtype=torch.float64))
    for deviations, factor in ((5.9, 1.0), (6.1, 0.0), (-20.0, 1.0), (math.inf, 0.0)):
        rows = {"norms": noise(200), "losses": noise(200)}
        rows[what] = list(quiet)
        for name, row in rows.items():
            row.append(float(mean + deviations * deviation) if name == what else 3.0)
        assert fold(guards.skip_step, **rows)[-1] == factor, deviations


def test_skip_step_judges_from_the_64th_step_on():
    assert fold(guards.skip_step, [*noise(62), 100.0])[-1] == 1.0
    assert fold(guards.skip_step, [*noise(63), 100.0])[-1] == 0.0


def test_skip_step_leaves_out_every_bad_batch_of_a_row_and_accepts_a_level_that_stays():
    row = fold(guards.skip_step, [*noise(128), *[9.0] * 60, *noise(5, seed=2), *[9.0] * 129])
    assert row == [1.0] * 128 + [0.0] * 60 + [1.0] * 5 + [0.0] * 128 + [1.0]


def test_a_norm_that_is_not_finite_never_enters_a_state():
    for guard in guards.RULES.values():
        before, _ = guard({}, 3.0, 1.0)
        assert guard(before, math.inf, 1.0)[0] == before
    assert guards.skip_step({}, 3.0, math.nan) == ({}, 0.0)


def test_zclip_clips_reciprocally():
    """The formulas of the paper, written again with NumPy: warm-up, mean, variance, threshold."""
    norms = [*noise(40), 5.0, 30.0, *noise(10, seed=2), 4.0]
    mean, variance = np.mean(norms[:25]), np.var(norms[:25])
    expected = [1.0] * 25
    for norm in norms[25:]:
        z = (norm - mean) / (np.sqrt(variance) + 1e-6)
        clipped = mean + 2.5 * np.sqrt(variance) / (z / 2.5) if z > 2.5 else norm
        expected.append(clipped / norm)
        mean = 0.97 * mean + 0.03 * clipped
        variance = 0.97 * variance + 0.03 * (clipped - mean) ** 2
    found = fold(guards.zclip, norms)
    assert found == pytest.approx(expected, rel=1e-12)
    assert sum(factor < 1 for factor in found) >= 3
    assert found[41] < found[40] * 5 / 30 * 1.1  # the higher one is clipped lower


SHORT = {"_WINDOW": 6, "_ZCLIP_WARMUP": 3}
"""Of windows and warm-ups, so that six steps pass through all of them."""
RAISED = {4: 40.0}
"""Factor of the loss in a step."""


class Raised:
    """An objective whose loss is multiplied in some steps."""

    def __init__(self, objective, step, factor=None):
        self.objective, self.terms = objective, objective.terms
        self.factor = factor or RAISED.get(step, 1.0)

    def loss(self, model, batch):
        return self.objective.loss(model, batch) * self.factor


def guarded(guard, **changes):
    return OptimizerConfig(epsilon=1e-3, weight_decay=0.01, guard=guard, **changes)


def shorten(monkeypatch):
    for name, value in SHORT.items():
        monkeypatch.setattr(guards, name, value)


def train(built, steps, leave_out=(), factors=None):
    data, results = engines.batches(2), []
    for number, step in enumerate(step for step in steps if step not in leave_out):
        mine = data.micro_batches(step, built.rank, built.world_size)
        objective = Raised(data.objective, step, (factors or {}).get(step))
        results.append(built.step(mine, objective, RATE, 1, number if leave_out else step))
    return results


def plain(guard, clipping=0.0):
    """Train with plain PyTorch: the guards once more, on whole gradients of one model."""
    model = engines.fresh_model(0.0)
    config, data = guarded("none"), engines.batches(engines.GLOBAL_BATCH)
    built = optimizers.build(model, config)
    reference = REFERENCES[guard]([], clipping)
    losses, norms, factors = [], [], []
    for step in range(6):
        (batch,) = data.micro_batches(step, 0, 1)
        tensors = {name: torch.from_numpy(array) for name, array in batch.arrays.items()}
        built.zero_grad()
        loss = Raised(data.objective, step).loss(model, tensors)[0] / batch.targets[0]
        loss.backward()
        gradients = [p.grad for p in model.parameters()]
        norm = float(torch.nn.utils.get_total_norm(gradients))
        kept = [n for n, factor in zip(norms, factors, strict=True) if factor > 0]
        is_left_out = reference(step, gradients, norm, losses, kept)
        losses.append(loss.item())
        norms.append(norm)
        left = float(torch.nn.utils.get_total_norm(gradients))
        factors.append(0.0 if is_left_out else left / norm)
        if not is_left_out:
            done = sum(factor > 0 for factor in factors) - 1
            optimizers.set_step(built.param_groups, config, RATE, done)
            built.step()
    return model.state_dict(), norms, factors


def plain_skip_step(state, clipping):
    def judge(step, gradients, norm, losses, norms):
        last = norms[-6:]
        return len(last) > 1 and norm > np.mean(last) + 6 * np.std(last, ddof=1)

    return judge


def plain_zclip(state, clipping):
    def judge(step, gradients, norm, losses, norms):
        limit = norm
        if step == 2:
            state[:] = [np.mean([*norms, norm]), np.var([*norms, norm])]
        elif step > 2:
            mean, variance = state
            z = (norm - mean) / (math.sqrt(variance) + 1e-6)
            limit = mean + 2.5**2 * math.sqrt(variance) / z if z > 2.5 else norm
            mean = 0.97 * mean + 0.03 * limit
            state[:] = [mean, 0.97 * variance + 0.03 * (limit - mean) ** 2]
        for gradient in gradients:
            gradient.mul_(min(limit, clipping or limit, norm) / norm)
        return False

    return judge


REFERENCES = {"skip-step": plain_skip_step, "zclip": plain_zclip}


MARKS = {
    **dict.fromkeys([("zero0_fp32", 1), ("zero1_fp32", 2), ("zero3_fp32", 2)], ()),
    ("zero3_fp32", 3): pytest.mark.slow,
}
"""Of stage and ranks; the others are long."""


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        pytest.param(name, ranks, marks=MARKS.get((name, ranks), pytest.mark.long))
        for name in ("zero0_fp32", "zero1_fp32", "zero2_fp32", "zero3_fp32")
        for ranks in (1, 2, 3)
        if ranks < 3 or name != "zero0_fp32"
    ],
)
@pytest.mark.parametrize(
    ("guard", "clipping"), [("skip-step", 0.0), ("zclip", 0.0), ("zclip", 100.0)]
)
def test_a_guarded_run_trains_like_plain_pytorch(
    guard, clipping, name, ranks, run_ranks, tmp_path, monkeypatch
):
    shorten(monkeypatch)
    if ranks == 3:
        monkeypatch.setattr(engines, "GLOBAL_BATCH", 6)

    def work():
        built = engines.build(name, micro=2, clipping=clipping, optimizer=guarded(guard))
        results = train(built, range(6))
        save_engine(built, tmp_path, 6)
        return results

    reported = run_ranks(ranks, work)
    assert all(results == reported[0] for results in reported)
    weights, norms, factors = plain(guard, clipping)
    assert [r.gradient_norm for r in reported[0]] == pytest.approx(norms, rel=2e-5)
    if not clipping:
        assert [r.guard_factor for r in reported[0]] == pytest.approx(factors, rel=2e-4)
    assert reported[0][4].guard_factor < 0.9
    assert not any(r.skipped for r in reported[0])
    for tensor_name, tensor in engines.weights_of(tmp_path, 6).items():
        torch.testing.assert_close(tensor, weights[tensor_name], rtol=0, atol=5e-6, msg=tensor_name)


@pytest.mark.parametrize(
    "name", engines.shipped("", fast=["zero1_bf16", "zero2_fp16"], others=pytest.mark.long)
)
def test_an_update_that_is_left_out_changes_nothing(name, run_ranks, monkeypatch):
    """Neither weights nor moments nor Adam's step, nor fp16's loss scale."""
    shorten(monkeypatch)

    def work(leave_out):
        built = engines.build(
            name, micro=2, optimizer=guarded("none" if leave_out else "skip-step")
        )
        return train(built, range(6), leave_out), engines.masters(built._deepspeed)

    (results, weights), _ = run_ranks(2, work, ())
    (expected, expected_weights), _ = run_ranks(2, work, (4,))[0], None
    assert [r.guard_factor for r in results] == [1.0, 1.0, 1.0, 1.0, 0.0, 1.0]
    assert not any(r.skipped or r.scale_exhausted for r in results)
    assert len({r.loss_scale for r in results}) == 1
    assert results[5].loss == expected[4].loss
    engines.assert_same_bits(weights, expected_weights)


@pytest.mark.parametrize(
    "name",
    engines.shipped("", fast=["zero0_fp32", "zero3_fp32"], others=pytest.mark.long),
)
@pytest.mark.parametrize("guard", GUARDS)
def test_stop_and_resume_gives_the_same_bits(guard, name, run_ranks, tmp_path, monkeypatch):
    """The state of the guard is the checkpoint's."""
    shorten(monkeypatch)

    def work():
        straight = engines.build(name, micro=2, optimizer=guarded(guard))
        train(straight, range(3))
        save_engine(straight, tmp_path, 3)
        expected = train(straight, range(3, 6))
        again = engines.build(name, micro=2, optimizer=guarded(guard))
        again.load(checkpoints.folder_of(tmp_path, 3))
        assert train(again, range(3, 6)) == expected
        engines.assert_same_bits(
            engines.masters(again._deepspeed), engines.masters(straight._deepspeed)
        )
        groups = (built._deepspeed.optimizer.param_groups for built in (straight, again))
        left, right = (group[0][guards.KEY] for group in groups)
        assert left == right
        return expected

    assert run_ranks(2, work)[0][1].guard_factor < 0.9


@pytest.mark.parametrize(
    ("guard", "name"),
    [
        *(("skip-step", "zero3_fp32"), ("zclip", "zero1_fp32")),
        *slow(("skip-step", "zero1_fp32"), ("zclip", "zero3_fp32")),
    ],
)
def test_another_number_of_ranks_goes_on_with_the_same_state(
    guard, name, run_ranks, tmp_path, monkeypatch
):
    shorten(monkeypatch)

    def work(load):
        built = engines.build(name, micro=2, optimizer=guarded(guard))
        if load:
            built.load(checkpoints.folder_of(tmp_path, 3))
        else:
            train(built, range(3))
            save_engine(built, tmp_path, 3)
        return [(r.loss, r.gradient_norm, r.guard_factor) for r in train(built, range(3, 6))]

    expected, found = run_ranks(2, work, False)[0], run_ranks(1, work, True)[0]
    assert expected[1][2] < 0.9
    for left, right in zip(found, expected, strict=True):
        assert left == pytest.approx(right, rel=1e-4)


def test_a_guard_adds_no_reduction(run_ranks, monkeypatch):
    def work():
        calls, all_sum = [], distributed.all_sum

        def noted(values, device):
            calls.append("all_sum")
            return all_sum(values, device)

        for caller in (engine, by_parameter):
            monkeypatch.setattr(caller, "all_sum", noted)
        built = engines.build("zero0_fp32", micro=2, optimizer=guarded("skip-step"))
        data = engines.batches(2)
        mine = data.micro_batches(0, built.rank, built.world_size)
        built.step(mine, data.objective, RATE, 1, 0, counts=(100, 10))
        return calls

    assert run_ranks(2, work)[0] == ["all_sum"]


@pytest.mark.parametrize("guard", GUARDS)
def test_a_gradient_that_is_not_finite_is_for_the_detector(guard, run_ranks, monkeypatch):
    """ZeRO skips it before a guard sees it; at stage 0 skip-step does, and says so alike."""
    shorten(monkeypatch)

    def work(name):
        built = engines.build(name, micro=2, optimizer=guarded(guard))
        results = train(built, range(4), factors={2: float("inf")})
        state = built._deepspeed.optimizer.param_groups[0][guards.KEY]
        return [(r.skipped, r.guard_factor) for r in results], state

    for name in ("zero0_fp32", "zero1_fp32"):
        found, state = run_ranks(1, work, name)[0]
        assert found[2] == (name != "zero0_fp32" or guard == "skip-step", 1.0)
        numbers = [n for value in state.values() for n in (value if type(value) is list else [])]
        assert all(map(math.isfinite, numbers))
