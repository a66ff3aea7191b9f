"""Silent corruption: hashes, who is named, and comparisons between real ranks."""

import pytest
import torch

from pretrain.config.load import load
from pretrain.engine import corruption
from pretrain.engine.corruption import Fingerprint
from tests.pretrain.builders import save_engine, slow
from tests.pretrain.engine import test_engine as engines

RIGHT, WRONG, OTHER = (1, 2, 3), (1, 9, 3), (7, 2, 3)


def rank(weights=RIGHT, *results, processor="a", host="one", has_changed=False):
    return Fingerprint(host, processor, weights, results or (RIGHT,), has_changed)


def found(*prints):
    finding = corruption.compare(prints, ["x", "y", "z"])
    return finding.ranks if finding else ()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_every_bit_of_every_element_changes_the_hash(dtype):
    torch.manual_seed(1)
    numbers = torch.randn(3, 5).to(dtype)
    numbers[0, :2] = torch.tensor([0.0, 1e-41]).to(dtype)  # flips among denormals count, too
    bits = numbers.view(corruption._INTEGERS[numbers.element_size()])
    seen = {corruption.hashes([numbers])}
    for place in range(numbers.numel()):
        for bit in range(8 * numbers.element_size()):
            mask = torch.tensor(1).bitwise_left_shift(bit).to(bits.dtype)
            bits.view(-1)[place] ^= mask
            assert corruption.hashes([numbers]) not in seen, (place, bit)
            bits.view(-1)[place] ^= mask
    assert corruption.hashes([numbers, numbers.t()]) == (*seen.pop() * 2,)
    assert corruption.hashes([]) == ()


def test_most_ranks_are_right():
    assert found(*[rank()] * 4) == ()
    assert found(rank(), rank(WRONG), rank(), rank(RIGHT, OTHER)) == (1, 3)
    assert found(rank(WRONG), rank(), rank(WRONG), rank(WRONG)) == (1,)


def test_without_a_majority_all_are_named():
    assert found(rank(), rank(WRONG)) == (0, 1)
    assert found(rank(), rank(WRONG), rank(OTHER)) == (0, 1, 2)
    assert found(rank(), rank(), rank(WRONG), rank(WRONG)) == (0, 1, 2, 3)


def test_a_rank_that_disagrees_with_itself_is_wrong_and_speaks_for_nobody():
    assert found(rank(RIGHT, WRONG, RIGHT)) == (0,)
    assert found(rank(RIGHT, RIGHT, RIGHT), rank(RIGHT, WRONG, RIGHT)) == (1,)
    assert found(rank(), rank(WRONG), rank(WRONG, RIGHT, OTHER)) == (0, 1, 2)
    assert found(rank(), rank(has_changed=True)) == (1,)
    assert found(rank(), rank(WRONG, has_changed=True)) == (1,)


def test_an_optimizer_that_has_made_no_update_keeps_nothing_to_compare():
    """Its hashes would lie on another device than those of a GPU's optimizer."""
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight])
    kept = corruption.Kept(optimizer)
    kept.note()  # the first update was skipped
    kept.check()
    assert kept._changes == []
    weight.grad = torch.ones(3)
    optimizer.step()
    kept.note()
    optimizer.state[weight]["exp_avg"][0] = 7
    kept.check()
    assert kept.has_changed()


def test_processors_of_different_kinds_are_not_compared():
    others = [rank(WRONG, OTHER, processor="b")] * 2
    assert found(rank(), *others, rank()) == ()
    assert found(rank(), rank(), rank(OTHER), *others) == (2,)


def test_a_finding_names_ranks_hosts_and_weights():
    finding = corruption.compare([rank(), rank(), rank(WRONG, host="two")], ["x", "y", "z"])
    assert (finding.ranks, finding.hosts) == ((2,), ("two",))
    assert finding.reason == "rank 2 on two: weights differ from the majority (y)"


def compare(built, step=0):
    """One comparison of the ranks, as an attempt makes it."""
    data = engines.batches(2)
    (batch, *_) = data.micro_batches(step, 0, built.world_size)
    return built.find_corruption(batch, data.objective, data.seed(step), step)


def flip(tensor, place, bit):
    """Flip one bit of a number, as a defective memory might."""
    whole = corruption._INTEGERS[tensor.element_size()]
    with torch.no_grad():
        tensor.view(-1)[place : place + 1].view(whole).bitwise_xor_(torch.tensor(1 << bit))


def break_activations(built, every=1):
    """Flip the lowest bit of an activation in every so many forward passes."""
    calls = []

    def defect(module, inputs, output):
        calls.append(1)
        if len(calls) % every == 0:
            flip(output, 5, 0)
        return output

    built.module.module.encoder.layers[0].register_forward_hook(defect)


def kept_by(built):
    """What the optimizer keeps: the tensors that it updates, and their moments."""
    optimizer = built._deepspeed.optimizer
    wrapped = optimizer.optimizer if built._deepspeed.zero_optimization_stage() else optimizer
    tensors = list(wrapped.state)
    return [
        *tensors,
        *(v for each in tensors for v in wrapped.state[each].values() if v.numel() > 1),
    ]


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        # Every ZeRO stage and every optimizer is in the fast tests, not every pair.
        pytest.param(
            name,
            optimizer,
            id=f"{optimizer.name}-{name}",
            marks=[] if optimizer is fast else [pytest.mark.slow],
        )
        for name, fast in (
            ("zero0_fp32", engines.SMOOTH),
            ("zero1_bf16", engines.LAMB),
            ("zero3_fp32", engines.MUON),
            ("zero2_fp32", engines.SMOOTH),
        )
        for optimizer in (engines.SMOOTH, engines.LAMB, engines.MUON)
    ],
)
def test_numbers_that_change_between_two_updates_are_found(run_ranks, name, optimizer):
    """Weights and moments, the lowest bit of one number, on one of two ranks."""

    def work():
        built = engines.build(name, 2, optimizer=optimizer, compared=True)
        engines.train(built, 2, [0, 1])
        found = [compare(built, 0)]
        kept = len(kept_by(built))
        for number in range(0, kept, 1 + kept // 10):
            engines.train(built, 2, [2])
            if built.rank == 1:
                flip(kept_by(built)[number], 0, 0)
            engines.train(built, 2, [3])
            found.append(compare(built, 0))
        return found

    (sound, *found), others = run_ranks(2, work)
    assert others == [sound, *found]
    assert sound is None
    assert len(found) >= 3
    for finding in found:
        assert 1 in finding.ranks
        assert "rank 1" in finding.reason
        assert "changed between two updates" in finding.reason
        assert "rank 0" not in finding.reason or name == "zero0_fp32"  # rank 0 lacks the change


@pytest.mark.parametrize("name", ["zero0_fp32", "zero1_bf16", "zero3_bf16", *slow(["zero2_fp32"])])
def test_comparisons_find_nothing_in_a_sound_run_and_change_no_bit_of_it(run_ranks, name, tmp_path):
    def work(compares):
        built = engines.build(name, 2, dropout=0.1, clipping=1.0, compared=compares)
        found = []
        for step in range(4):
            engines.train(built, 2, [step])
            if compares:
                found.append(compare(built, step))
        folder = tmp_path / f"{compares}"
        save_engine(built, folder, 4)
        return found

    assert run_ranks(2, work, False) == [[], []]
    assert run_ranks(2, work, True) == [[None] * 4] * 2
    left, right = (engines.weights_of(tmp_path / f"{each}", 4) for each in (False, True))
    engines.assert_same_bits(left, right)


@pytest.mark.parametrize("name", ["zero1_fp32", "zero2_bf16", "zero3_fp32"])
def test_a_rank_that_computes_wrongly_is_named_by_the_others(run_ranks, name):
    def work():
        built = engines.build(name, 2)
        engines.train(built, 2, [0])
        if built.rank == 1:
            break_activations(built)
        return compare(built, 0)

    first, *others = run_ranks(4, work)
    assert first is not None
    assert first.ranks == (1,)
    assert "other results" in first.reason
    assert others == [first] * 3


def test_a_rank_that_computes_wrongly_now_and_then_is_named_by_two_and_alone(run_ranks):
    def work():
        built = engines.build("zero1_fp32", 2)
        if built.rank == built.world_size - 1:
            break_activations(built, every=2)
        return compare(built, 0), compare(built, 0)

    # Of two, the first computation is right, and the ranks agree: the next comparison finds it.
    for first, second in run_ranks(2, work):
        assert first is None
        assert second is not None
    ((alone, _),) = run_ranks(1, work)
    assert alone.ranks == (0,)
    assert "different bits from the same micro-batch" in alone.reason


@pytest.mark.parametrize("name", ["zero1_fp32", "zero2_bf16"])
def test_weights_that_are_not_shared_any_more_are_named(run_ranks, name):
    def work():
        built = engines.build(name, 2)
        engines.train(built, 2, [0])
        weight = built.module.module.encoder.layers[1].contract.weight
        if built.rank == 1:
            flip(weight, 3, 1)
        return compare(built, 0)

    for finding in run_ranks(2, work):
        assert finding.ranks == (0, 1)
        assert finding.reason.count("encoder.layers.1.contract.weight") == 2


def test_ranks_with_other_numbers_of_threads_are_not_compared(run_ranks):
    """They may round differently, and each is compared with itself."""

    def work():
        built = engines.build("zero1_fp32", 2)
        torch.set_num_threads(1 + built.rank)
        return compare(built, 0), corruption.processor(built.device)

    (first, one), (second, two) = run_ranks(2, work)
    assert first is None
    assert second is None
    assert one != two


def test_an_attempt_compares_at_its_interval_or_is_refused():
    with pytest.raises(ValueError, match="comparison_interval 3 does not divide .* 500"):
        load("demo", ["training.comparison_interval=3", "training.checkpoint_interval=500"])
    config = load("demo", ["training.comparison_interval=50", "training.checkpoint_interval=500"])
    assert config.training.comparison_interval == 50
