"""The engine with real DeepSpeed on several processes: updates, save and load."""

import dataclasses
import functools
import os

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

from data_prep.common.exit_codes import EXIT_SPIKE
from pretrain.config.deepspeed import DS_CONFIGS
from pretrain.config.run import Sizes
from pretrain.config.sections import BatchConfig, OptimizerConfig, SpikeConfig
from pretrain.engine import engine, optimizers, workarounds
from pretrain.engine.consolidated import consolidated_weights
from pretrain.loop.loop import run as run_loop
from pretrain.model import presets
from pretrain.model.config import VOCABULARY_MULTIPLE
from pretrain.model.language_model import LanguageModel
from pretrain.model.layers import checkpoint_activations, compile_layers
from pretrain.objectives.base import Block
from pretrain.objectives.masked import MaskedLM, MaskedLMConfig
from pretrain.records import checkpoints, metrics
from pretrain.spikes.detector import SpikeDetector
from pretrain.spikes.live import SpikeWatch, observation
from tests.pretrain.builders import (
    Trap,
    batches_of,
    one_update,
    pairwise,
    save_engine,
    slow,
    weights_of,
)

VOCABULARY = 101
LENGTH = 24
GLOBAL_BATCH = 8
LEARNING_RATES = [1e-3, 5e-4, 2e-3, 1e-3]
# With a large epsilon the update is smooth in the gradient, so errors of the gradient stay small.
SMOOTH = OptimizerConfig(epsilon=1e-3, weight_decay=0.01)
LAMB = dataclasses.replace(SMOOTH, name="lamb", weight_decay_on="matrices")
MUON = dataclasses.replace(LAMB, name="muon")
EACH_STAGE = ["zero1_bf16", "zero2_fp16", "zero3_fp32"]
"""What the fast suite tries where the slow one tries every file."""


class RandomBlocks:
    """Blocks of different lengths, without a corpus."""

    sequence_length = LENGTH

    def __len__(self):
        return 37

    def __getitem__(self, block):
        draw = np.random.default_rng(block)
        return Block(draw.integers(4, VOCABULARY - 1, draw.integers(LENGTH // 2, LENGTH + 1)))


def sizes(micro):
    return BatchConfig(global_batch_size=GLOBAL_BATCH, micro_batch_size=micro)


class MaskedAndPairs(MaskedLM):
    """Masked tokens, and pairs of invented classes where the model has a head for them."""

    def loss(self, model, batch):
        if not getattr(model, "module", model).config.pair_head:
            return super().loss(model, batch)
        ids = batch["input_ids"]
        segments = (torch.arange(LENGTH) >= LENGTH // 2).long().expand_as(ids)
        logits, pairs = model(
            ids,
            batch.get("document_ids"),
            batch["target_positions"],
            segment_ids=segments,
            with_pairs=True,
        )
        masked = cross_entropy(logits.float(), batch["labels"], reduction="sum")
        return (masked + cross_entropy(pairs.float(), ids[:, 1] % 2, reduction="sum")).view(1)


MASKED = MaskedAndPairs(MaskedLMConfig(), VOCABULARY - 1, VOCABULARY - 1)


def batches(micro, growing=(), objective=MASKED):
    """Batches of one size, or of those that `growing` has by step."""
    made = batches_of(RandomBlocks(), objective, sizes(micro))
    return dataclasses.replace(made, sizes=Sizes(growing)) if growing else made


OUTSIDE_LAYERS = {
    "t5 bias": ("baseline", {"position": "t5-bias"}),
    "trained slopes": ("zero-clap", {"alibi_slopes": "trained"}),
    "basis of latents": ("char-perceiver", {"latents": 8, "num_layers": 3, "position": "t5-bias"}),
}
"""Variants with parameters outside the layers that act on them or within them."""
FACTORISED = {"num_layers": 4, "embedding_size": 16, "pair_head": True}
SHARED = {"all": {}, "attention": {"layer_groups": 2}, "feed-forward": {"layer_groups": 2}}
"""What the layers of a group of an ALBERT model share."""
VARIANTS = OUTSIDE_LAYERS | {
    sharing: ("albert", {**FACTORISED, "sharing": sharing, **groups})
    for sharing, groups in SHARED.items()
}


def fresh_model(dropout, variant="zero-clap"):
    """The token embedding is padded with zero rows, as in the recipes."""
    torch.manual_seed(1)
    variant, changes = VARIANTS.get(variant, (variant, {}))
    overrides = {"dropout": dropout, "attention_dropout": dropout, **changes}
    config = presets.build("tiny", variant, VOCABULARY, overrides)
    return LanguageModel(config, VOCABULARY_MULTIPLE)


def build(
    name,
    micro,
    dropout=0.0,
    clipping=0.0,
    optimizer=SMOOTH,
    variant="zero-clap",
    precision=None,
    zero=None,
    changed=lambda model: None,
):
    """An engine; `precision` and `zero` update sections of its configuration."""
    process = engine.start()
    settings = engine.deepspeed_json(name, sizes(micro), clipping, process.world_size)
    if "fp16" in settings:  # a norm of 50, of few targets, overflows at the usual scale
        settings["fp16"] |= {"initial_scale_power": 7, **(precision or {})}
    elif precision:
        settings["bf16"] |= precision
    settings.get("zero_optimization", {}).update(zero or {})
    model = fresh_model(dropout, variant)
    changed(model)
    return engine.Engine(model, optimizer, settings, process)


def train(built, micro, steps, growing=(), objective=MASKED):
    data = batches(micro, growing, objective)
    results = []
    for step in steps:
        mine = data.micro_batches(step, built.rank, built.world_size)
        rate = LEARNING_RATES[step % len(LEARNING_RATES)]
        results.append(one_update(built, mine, data.objective, rate, step))
    return results


def train_and_save(run, name, micro=2, steps=3, growing=(), objective=MASKED, **options):
    """The results of an engine's first steps, after which it is saved."""
    built = build(name, micro, **options)
    results = train(built, micro, range(steps), growing, objective)
    save_engine(built, run, steps)
    return results


def assert_same_bits(left, right):
    assert left.keys() == right.keys()
    differing = [name for name in left if not torch.equal(left[name], right[name])]
    assert not differing


@functools.cache
def plain(
    clipping=0.0,
    steps=3,
    micro=GLOBAL_BATCH,
    variant="zero-clap",
    optimizer=SMOOTH,
    growing=(),
    objective=MASKED,
):
    """Train with a plain PyTorch loop; by default each global batch is one forward pass.

    The loss is the formula of law 4.
    """
    model = fresh_model(0.0, variant)
    built = optimizers.build(model, optimizer)
    data, losses, norms = batches(micro, growing, objective), [], []
    for step in range(steps):
        passes = data.micro_batches(step, 0, 1)
        counts = [sum(each) for each in zip(*(batch.targets for batch in passes), strict=True)]
        summed = 0.0
        built.zero_grad()
        for batch in passes:
            sums = objective.loss(model, batch.to(torch.device("cpu")))
            terms = zip(objective.terms.values(), sums, counts, strict=True)
            loss = sum(weight * nats / count for weight, nats, count in terms if count)
            loss.backward()
            summed += loss.item()
        optimizers.set_step(built.param_groups, optimizer, LEARNING_RATES[step], step)
        losses.append(summed)
        limit = clipping or float("inf")
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), limit)))
        built.step()
    return model.state_dict(), losses, norms


def assert_like_plain(results, run, **case):
    """Losses, norms of gradients and the weights in the end are those of `plain`."""
    weights, losses, norms = plain(**case)
    for result, loss, norm in zip(results, losses, norms, strict=True):
        assert result.loss == pytest.approx(loss, abs=2e-6)
        assert result.gradient_norm == pytest.approx(norm, rel=2e-5)
    found = weights_of(run, len(losses))
    assert found.keys() == weights.keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=2e-6, msg=name)


def assert_near_plain(results, run, limit, dtype=torch.bfloat16, **case):
    """As `assert_like_plain`, up to rounding; weights differ by that share of their moves."""
    weights, losses, norms = plain(**case)
    for result, loss, norm in zip(results, losses, norms, strict=True):
        assert not result.skipped
        assert result.loss == pytest.approx(loss, rel=2e-3)
        assert result.gradient_norm == pytest.approx(norm, rel=1e-2)
    start = fresh_model(0.0, case.get("variant", "zero-clap")).state_dict()
    found = weights_of(run, len(losses))
    # LAMB moves every weight by less than DeepSpeed rounds the initial ones.
    moves = [(weights[n] - start[n], found[n] - start[n].to(dtype).float()) for n in start]
    moved = sum(float(exact.square().sum()) for exact, _ in moves) ** 0.5
    missed = sum(float((exact - other).square().sum()) for exact, other in moves) ** 0.5
    assert missed < moved * limit


@pytest.mark.parametrize(
    ("stage", "ranks", "clipping", "optimizer"),
    pairwise(range(4), (1, 2, 3), (0.0, 5.0), (SMOOTH, LAMB, MUON)),
)
def test_any_split_of_a_batch_trains_like_one_plain_pass(
    stage, ranks, clipping, optimizer, run_ranks, tmp_path
):
    """Law 4; micro-batches have different numbers of masked tokens, accumulation is 4 or 2; of
    3 ranks, two have an empty one.

    Every stage reports the norm before clipping, and clips as torch does.
    """
    case = {"clipping": clipping, "optimizer": optimizer}
    reported = run_ranks(ranks, lambda: train_and_save(tmp_path, f"zero{stage}_fp32", **case))
    assert all(results == reported[0] for results in reported)
    assert_like_plain(reported[0], tmp_path, **case)
    assert min(plain(**case)[2]) > 5.0


@pytest.mark.parametrize("variant", OUTSIDE_LAYERS)
def test_parameters_outside_the_layers_are_trained_at_stage_3_as_without_deepspeed(
    variant, run_ranks, tmp_path
):
    """They are read once, before the layers, and partitioned like all others."""
    # With a threshold, so small a parameter stays whole on every rank.
    zero = {"stage3_param_persistence_threshold": 0}
    work = functools.partial(train_and_save, tmp_path, "zero3_fp32", variant=variant, zero=zero)
    assert_like_plain(run_ranks(2, work)[0], tmp_path, variant=variant)
    found, begun = weights_of(tmp_path, 3), fresh_model(0.0, variant).state_dict()
    for name, tensor in plain(variant=variant)[0].items():
        if "score_bias" in name or name.endswith("basis"):
            moved = tensor - begun[name]
            assert float(moved.norm()) > 2e-5, "more than by weight decay"
            difference = found[name] - begun[name] - moved
            assert float(difference.norm()) < 0.01 * float(moved.norm())


@pytest.mark.parametrize(
    ("stage", "ranks", "sharing"),
    [
        pytest.param(
            *(stage, ranks, sharing),
            marks=() if ranks == 2 and stage != 2 and sharing == "all" else pytest.mark.slow,
        )
        for stage in (1, 2, 3)
        for ranks in (1, 2)
        for sharing in SHARED
    ],
)
def test_shared_weights_are_trained_as_without_deepspeed(
    stage, ranks, sharing, run_ranks, tmp_path
):
    """Each is called several times in a forward pass, and stands once in a checkpoint."""
    zero = {"stage3_param_persistence_threshold": 0} if stage == 3 else {}
    case = {"steps": 4, "variant": sharing, "optimizer": LAMB}
    work = functools.partial(train_and_save, tmp_path, f"zero{stage}_fp32", zero=zero, **case)
    assert_like_plain(run_ranks(ranks, work)[0], tmp_path, **case)
    begun = fresh_model(0.0, sharing).state_dict()
    for name, tensor in weights_of(tmp_path, 4).items():
        assert not torch.equal(tensor, begun[name]), name


def shipped(*endings, fast=None):
    """Every file of ds_configs/ with one of these endings; fp16 is skipped if the CPU lacks it.

    Files that are not in `fast` are slow; by default, those with offload.
    """
    from deepspeed.accelerator import get_accelerator

    no_fp16 = pytest.mark.skipif(
        not get_accelerator().is_fp16_supported(), reason="this CPU does not compute in fp16"
    )
    names = sorted(path.stem for path in DS_CONFIGS.glob("*.json") if path.stem.endswith(endings))
    rest = [name for name in names if ("offload" in name if fast is None else name not in fast)]
    return [
        pytest.param(name, marks=[no_fp16] * ("fp16" in name) + [pytest.mark.slow] * (name in rest))
        for name in names
    ]


GROWING = ((0, 2), (1, 4), (2, 6), (3, 8))
"""Batches of 2, 4, 6 and 8: on two ranks, 1 to 4 passes a step."""


@pytest.mark.parametrize("name", ["zero0_fp32", "zero1_bf16", "zero3_fp32"])
def test_a_growing_batch_trains_like_plain_passes(name, run_ranks, tmp_path):
    """Law 4, although DeepSpeed is configured with one number of accumulation steps."""
    case = {"steps": 4, "micro": 1, "growing": GROWING}
    results = run_ranks(2, lambda: train_and_save(tmp_path, name, **case))[0]
    if name.endswith("fp32"):
        assert_like_plain(results, tmp_path, **case)
    else:
        assert_near_plain(results, tmp_path, 0.02, **case)


class Weighted:
    """An objective whose loss is multiplied by a factor of the batch."""

    def __init__(self, objective):
        self.objective, self.terms = objective, objective.terms

    def loss(self, model, batch):
        return self.objective.loss(model, batch) * batch["factor"][0]


@pytest.mark.parametrize("name", ["zero1_bf16", "zero2_bf16", "zero3_bf16"])
def test_bf16_gradients_are_accumulated_in_fp32(name, run_ranks):
    """In bf16 (8 bits of precision) a gradient 512 times as large would absorb the others."""

    def work():
        built, data = build(name, micro=1), batches(1)
        batch = data.micro_batches(0, 0, 1)[0]

        def norm(factors):
            mine = [
                dataclasses.replace(batch, arrays={**batch.arrays, "factor": np.float32([factor])})
                for factor in factors
            ]
            return one_update(built, mine, Weighted(data.objective), 0.0, 0).gradient_norm

        return norm([512] + [1] * 7) / norm([512] + [0] * 7)

    assert run_ranks(1, work)[0] == pytest.approx(519 / 512, abs=0.002)


def test_bf16_gradients_of_the_ranks_are_added_in_fp32(run_ranks):
    """A sum in bf16 differs in the fourth digit."""

    def norm(name):
        work = lambda: train(build(name, micro=2), 2, [0])[0].gradient_norm  # noqa: E731
        return run_ranks(2, work)[0]

    expected = pytest.approx(norm("zero1_bf16"), rel=1e-5)
    names = ["zero2_bf16", "zero3_bf16", "zero3_bf16_offload"]
    assert [norm(name) for name in names] == [expected] * len(names)


class Operations(TorchDispatchMode):
    """Counts those that are kernels on a GPU."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += not function.is_view
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("name", "usual", "ranks"), [("zero1_bf16", "zero2_bf16", 1), ("zero1_fp32", "zero1_fp32", 2)]
)
def test_stage_1_adds_gradients_with_deepspeeds_bits_in_fewer_operations(
    name, usual, ranks, run_ranks, monkeypatch
):
    """Of the weights and the optimizer's state; the pair head has no gradient in some steps."""

    def trained(name):
        built = build(name, micro=1, dropout=0.1, clipping=5.0, variant="all", optimizer=LAMB)
        results = train(built, 1, range(2))
        with monkeypatch.context() as without_pairs, Operations() as counted:
            without_pairs.delattr(MaskedAndPairs, "loss")
            results += train(built, 1, range(2, 4))
        return results, dict(tensors_in(built._deepspeed.optimizer.state_dict())), counted.count

    def work():
        ours = trained(name)
        monkeypatch.setattr(workarounds, "accumulate_by_group", lambda *_: None)
        return ours, trained(usual)

    for (results, state, count), (expected, usual_state, usual_count) in run_ranks(ranks, work):
        assert results == expected
        assert_same_bits(state, usual_state)
        assert count < usual_count


HALF = [
    pytest.param(*shipped_file.values, variant, optimizer, marks=shipped_file.marks)
    for variant, optimizer, fast in (
        ("zero-clap", SMOOTH, None),
        ("zero-clap", LAMB, ["zero2_bf16"]),
    )
    for shipped_file in shipped("bf16", "fp16", "offload", fast=fast)
]
HALF += [("zero3_bf16", "modern", MUON), *slow(("zero2_bf16_offload", "modern", MUON))]


@pytest.mark.parametrize(("name", "variant", "optimizer"), HALF)
def test_half_precision_trains_like_fp32_up_to_rounding(
    name, variant, optimizer, run_ranks, tmp_path
):
    case = {"clipping": 5.0, "variant": variant, "optimizer": optimizer}
    results = run_ranks(2, lambda: train_and_save(tmp_path, name, **case))[0]
    half, limit = (torch.float16, 0.003) if "fp16" in name else (torch.bfloat16, 0.02)
    # Muon gives a direction that has little gradient, and a large error, as much weight as others.
    limit = 0.25 if optimizer is MUON else limit
    assert_near_plain(results, tmp_path, limit, half, **case)
    tokens = weights_of(tmp_path, 3)["encoder.embeddings.tokens.weight"]
    real = presets.build("tiny", variant, VOCABULARY, {}).vocab_size
    assert len(tokens) == 128
    assert not tokens[real:].any()


@pytest.mark.parametrize(
    ("name", "variant", "optimizer"),
    [
        *(
            pytest.param(*shipped_file.values, variant, optimizer, marks=shipped_file.marks)
            for variant, optimizer, fast in (
                ("zero-clap", SMOOTH, ["zero0_fp32", *EACH_STAGE]),
                ("all", LAMB, ["zero3_fp32"]),
            )
            for shipped_file in shipped("", fast=fast)
        ),
        ("zero1_bf16", "modern", MUON),
        *slow(("zero3_fp32", "modern", MUON), ("zero2_bf16_offload", "modern", MUON)),
    ],
)
def test_stop_and_resume_gives_the_same_bits_as_not_stopping(
    name, variant, optimizer, run_ranks, tmp_path
):
    """Law 2, with dropout and accumulation; includes the optimizer state."""

    def without_stop():
        built = build(name, micro=2, dropout=0.1, variant=variant, optimizer=optimizer)
        results = train(built, 2, range(2))
        save_engine(built, tmp_path / "straight", 2)
        results += train(built, 2, range(2, 4))
        save_engine(built, tmp_path / "straight", 4)
        return results

    def resumed():
        built = build(name, micro=2, dropout=0.1, variant=variant, optimizer=optimizer)
        built.load(checkpoints.folder_of(tmp_path / "straight", 2))
        results = train(built, 2, range(2, 4))
        save_engine(built, tmp_path / "resumed", 4)
        return results

    straight = run_ranks(2, without_stop)[0]
    again = run_ranks(2, resumed)[0]
    assert again == straight[2:]
    assert not any(result.skipped for result in straight)
    assert_same_bits(weights_of(tmp_path / "resumed", 4), weights_of(tmp_path / "straight", 4))
    states = [
        torch.load(path, weights_only=False)
        for run in ("straight", "resumed")
        for path in sorted(checkpoints.folder_of(tmp_path / run, 4).glob("*optim_states.pt"))
    ]
    half = len(states) // 2
    assert half == (0 if "zero0" in name else 2)
    assert not list(tmp_path.rglob("latest*"))
    for left, right in zip(states[:half], states[half:], strict=True):
        assert_same_bits(dict(tensors_in(left)), dict(tensors_in(right)))


@pytest.mark.parametrize(
    "name", ["zero3_fp32", *slow(["zero1_fp32"], ["zero2_bf16"], ["zero3_bf16"])]
)
def test_no_uninitialised_memory_reaches_a_checkpoint(name, run_ranks, tmp_path):
    """ZeRO 3 pads parameters whose size the ranks do not divide with uninitialised memory."""

    def saved():
        torch.use_deterministic_algorithms(True)  # fills new memory with NaN
        small = {"reduce_bucket_size": 1000}  # the usual buffer of billions of bytes takes seconds
        train_and_save(tmp_path, name, steps=2, zero=small)

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


def test_dropout_differs_between_seeds_steps_and_micro_batches(run_ranks):
    def work():
        built = build("zero1_fp32", micro=2, dropout=0.5)
        data = batches(2)
        mine = data.micro_batches(0, built.rank, built.world_size)
        moved = [dataclasses.replace(batch, index=batch.index + 4) for batch in mine]
        seeded = [dataclasses.replace(batch, seed=2) for batch in mine]
        # At learning rate 0, only dropout changes the loss.
        return [
            one_update(built, some, data.objective, 0.0, step).loss
            for some, step in [(mine, 0), (mine, 0), (mine, 1), (seeded, 0), (moved, 0)]
        ]

    first, again, *others = run_ranks(2, work)[0]
    assert first == again
    assert len({first, *others}) == 4


def test_evaluation_has_no_dropout_counts_targets_alone_and_changes_no_training(run_ranks):
    def work():
        without = train(build("zero1_fp32", micro=2, dropout=0.1), 2, range(2))
        built = build("zero1_fp32", micro=2, dropout=0.1)
        data = batches(2)
        mine = data.micro_batches(5, built.rank, built.world_size)

        def sums(model, batch):
            (loss,) = data.objective.loss(model, batch).double()
            return torch.stack([loss, (batch["labels"] >= 0).sum()])

        idle = dataclasses.replace(mine[0], targets=(0,))
        seen = [built.evaluate(some, sums) for some in (mine, [*mine, idle])]
        return seen, train(built, 2, range(2)), without

    seen, with_evaluation, without = run_ranks(2, work)[0]
    assert seen[0] == seen[1]
    assert with_evaluation == without
    targets = sum(b.targets[0] for rank in range(2) for b in batches(2).micro_batches(5, rank, 2))
    assert seen[0][1] == targets


@pytest.mark.parametrize("name", ["zero0_fp32", "zero1_bf16", "zero2_fp32", "zero3_fp32"])
def test_consolidated_weights_are_the_fp32_weights_of_the_ranks(name, run_ranks, tmp_path):
    """Also in a folder whose name is a pattern, which loading takes literally as well."""
    run = tmp_path / "lr [1]"

    def work():
        built = build(name, micro=4)
        result = train(built, 4, range(1))[0]
        save_engine(built, run, 1)
        built.load(checkpoints.folder_of(run, 1))
        return result, built.weights()

    (result, expected), _ = run_ranks(2, work)
    assert np.isfinite(result.gradient_norm)
    consolidated = weights_of(run, 1)
    assert all(tensor.dtype == torch.float32 for tensor in consolidated.values())
    assert_same_bits(consolidated, expected)
    untrained = fresh_model(0.0).state_dict()
    assert all(not torch.equal(consolidated[n], untrained[n]) for n in untrained if "weight" in n)


@pytest.mark.parametrize("name", ["zero0_fp32", *EACH_STAGE])
def test_nothing_that_a_checkpoint_holds_is_executed(name, run_ranks, tmp_path, slow_fp16):
    """Whichever of its files holds it: when a run resumes, on other ranks, and for an export."""

    def work():
        built = build(name, micro=8)
        train(built, 8, range(1))
        save_engine(built, tmp_path, 1)
        folder, refused = checkpoints.folder_of(tmp_path, 1), []
        paths = sorted(folder.glob("*.pt"))
        loads = [built.load, consolidated_weights]
        if parts := list(folder.glob("*_optim_states.pt")):
            loads.append(lambda folder: built._reshard(folder, parts))
        for path in paths:
            sound = path.read_bytes()
            torch.save({**torch.load(path, weights_only=False), "more": Trap(tmp_path / "x")}, path)
            for load in loads:
                try:
                    load(folder)
                except ValueError as error:
                    refused.append((path.name, str(error)))
            path.write_bytes(sound)
        for load in loads:
            load(folder)
        return len(loads), [path.name for path in paths], refused

    ((loads, names, refused),) = run_ranks(1, work)
    assert not (tmp_path / "x").exists()
    assert sorted(name for name, _ in refused) == sorted(names * loads)
    assert all(name in message and "posix.mkdir" in message for name, message in refused)


class NonFinite:
    """An objective that makes the gradient of one weight infinite, on the last rank."""

    def __init__(self, objective, built):
        self.objective, self.terms = objective, objective.terms
        self.is_last = built.rank == built.world_size - 1

    def loss(self, model, batch):
        loss = self.objective.loss(model, batch)
        return loss + model.module.head.beta * float("inf") if self.is_last else loss


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        *(pytest.param(*each.values, 2, marks=each.marks) for each in shipped("", fast=EACH_STAGE)),
        ("zero1_fp32", 1),
        ("zero2_bf16", 1),
    ][1:],
)
def test_a_non_finite_gradient_skips_the_update_and_its_adam_step(name, ranks, run_ranks):
    """One infinite element does. The bias corrections of Adam count applied updates only."""

    def trained(corrupt):
        built, data = build(name, micro=2), batches(2)
        results = []
        for update, step in enumerate([0, 1, 2, 3] if corrupt else [0, 2, 3]):
            mine = data.micro_batches(step, built.rank, built.world_size)
            objective = data.objective
            if corrupt and step == 1:
                objective = NonFinite(objective, built)
            number = step if corrupt else update
            results.append(one_update(built, mine, objective, LEARNING_RATES[step], number))
        return results, built.weights()

    assert not name.startswith("zero0")
    found = run_ranks(ranks, lambda: [trained(True), trained(False)])
    ((results, weights), (results_without, expected)), *others = found
    norms = [result.gradient_norm for result in results]
    expected_norms = [result.gradient_norm for result in results_without]
    for (same_results, _), _ in others:
        assert norms == [result.gradient_norm for result in same_results]
    assert norms[1] is None
    assert [result.skipped for result in results] == [False, True, False, False]
    scales = [128.0, 128.0, 64.0, 64.0] if "fp16" in name else [1.0] * 4
    assert [result.loss_scale for result in results] == scales
    if "fp16" in name:
        assert [norms[0], *norms[2:]] == pytest.approx(expected_norms, rel=1e-4)
    else:
        assert [norms[0], *norms[2:]] == expected_norms
        assert_same_bits(weights, expected)


@pytest.mark.parametrize("name", ["zero1_fp16", "zero2_fp16", "zero3_fp16"])
def test_an_update_has_its_whole_gradient_when_the_loss_scale_grows(name, run_ranks, slow_fp16):
    """What the optimizer applies has the recorded norm, and that of a run whose scale stays."""

    def trained(window):
        built = build(name, 8, precision={"loss_scale_window": window})
        optimizer, applied = built._deepspeed.optimizer.optimizer, []
        step = optimizer.step

        def measured(*arguments):
            gradients = (p.grad for group in optimizer.param_groups for p in group["params"])
            squares = [float(each.float().square().sum()) for each in gradients if each is not None]
            applied.append(sum(squares))
            return step(*arguments)

        optimizer.step = measured
        norms, scales = [], []
        for number in range(6):
            applied.clear()
            (result,) = train(built, 8, [number])
            norms.append((result.gradient_norm, sum(applied) ** 0.5))
            scales.append(result.loss_scale)
        return norms, scales

    ((grown, same),) = run_ranks(1, lambda: [trained(2), trained(100)])
    (norms, scales), (expected, same_scales) = grown, same
    assert (scales, same_scales) == ([128.0] * 3 + [256.0] * 2 + [512.0], [128.0] * 6)
    for (reported, applied), (usual, _) in zip(norms, expected, strict=True):
        assert applied == pytest.approx(reported, rel=1e-3)
        assert reported == pytest.approx(usual, rel=1e-2)


@pytest.mark.parametrize(("name", "ranks"), [("zero1_fp16", 1), ("zero3_fp16", 2)])
def test_a_resumed_loss_scale_grows_as_the_settings_of_now_say(
    name, ranks, run_ranks, tmp_path, slow_fp16
):
    def begin():
        built = build(name, 2, precision={"loss_scale_window": 100})
        train(built, 2, range(2))
        save_engine(built, tmp_path, 2)

    def go_on():
        built = build(name, 2, precision={"loss_scale_window": 2})
        built.load(checkpoints.folder_of(tmp_path, 2))
        return [result.loss_scale for result in train(built, 2, range(2, 6))]

    run_ranks(ranks, begin)
    assert run_ranks(1, go_on) == [[128.0, 256.0, 256.0, 512.0]]


def test_a_loop_meets_twice_a_step_and_gives_what_single_updates_give(run_ranks, monkeypatch):
    def figures(results):
        return [(r.loss, r.gradient_norm, r.tokens, r.targets) for r in results]

    def work():
        calls = []
        for owner, name in ((engine, "all_sum"), (engine.Engine, "gather")):
            monkeypatch.setattr(owner, name, noted(getattr(owner, name), name, calls))
        alone = train(build("zero1_fp32", micro=2, dropout=0.1), 2, range(5))
        calls.clear()
        built, data, records = build("zero1_fp32", micro=2, dropout=0.1), batches(2), []
        run_loop(
            built,
            data.micro_batches,
            data.objective,
            learning_rate=lambda step: LEARNING_RATES[step % len(LEARNING_RATES)],
            steps=range(5),
            observers=[records.append],
            measure=lambda *_: {"seconds": built.rank + 0.5, "memory": 3.0},
        )
        results = [record.result for record in records]
        return figures(alone), figures(results), calls, [each.measured for each in records]

    (alone, looped, calls, measured), (_, others, *_) = run_ranks(2, work)
    assert measured == [{"seconds": (0.5, 1.5), "memory": (3.0, 3.0)}] * 5
    assert looped == alone
    assert others == []
    assert calls == ["gather"] + ["all_sum", "gather"] * 5


def noted(function, name, calls):
    def call(*arguments):
        calls.append(name)
        return function(*arguments)

    return call


class NonFiniteAt:
    """Batches and their objective, with a NaN loss or gradient on rank 1 in some steps."""

    def __init__(self, data, rank, loss=(), gradient=()):
        self.data, self.terms, self.rank = data, data.objective.terms, rank
        self.nan_losses, self.nan_gradients = loss, gradient

    def micro_batches(self, step, rank, world_size):
        self.step = step
        return self.data.micro_batches(step, rank, world_size)

    def loss(self, model, batch):
        loss = self.data.objective.loss(model, batch)
        if self.rank == 1 and self.step in self.nan_gradients:
            loss.register_hook(lambda gradient: gradient * float("nan"))
        return loss * float("nan") if self.rank == 1 and self.step in self.nan_losses else loss


WATCHED = SpikeConfig(window=128, patience=2)


def watched(built, steps, folder, **non_finite):
    """Run the loop with the live detector; returns the verdict, the results and the events.

    Also asserts that a replay of the recorded lines gives the same events.
    """
    data, records, events = NonFiniteAt(batches(2), built.rank, **non_finite), [], []
    watch = SpikeWatch(SpikeDetector(WATCHED), [], events.append)
    written = metrics.JsonLines(folder / metrics.METRICS)
    verdict = run_loop(
        built,
        data.micro_batches,
        data,
        learning_rate=lambda step: 1e-3,
        steps=range(steps),
        observers=[records.append, lambda each: written.write(metrics.line_of(each)), watch],
    )
    if built.rank == 0:
        lines, again = metrics.read_metrics(folder / metrics.METRICS), SpikeDetector(WATCHED)
        replayed = [event for line in lines for event in again.update(observation(line))]
        assert repr(replayed) == repr(events)
    results = [record.result for record in records]
    return verdict, results, [(e.kind, e.channel, e.step, e.onset) for e in events]


@pytest.mark.parametrize("name", shipped("", fast=EACH_STAGE)[1:])
def test_a_nan_loss_or_gradient_is_recorded_and_detected(name, run_ranks, tmp_path):
    """A single NaN heals, lasting NaN is a spike. In fp16 a NaN gradient counts as an overflow."""

    def work():
        built = build(name, micro=2)
        return watched(built, 30, tmp_path, loss={1, *range(15, 30)}, gradient={8})

    assert not name.startswith("zero0")
    (verdict, results, events), (same_verdict, *_) = run_ranks(2, work)
    assert verdict == same_verdict == EXIT_SPIKE
    fp16 = "fp16" in name
    assert events == [
        ("suspect", "non-finite", 1, 1),
        ("healed", "non-finite", 5, 1),
        *([] if fp16 else [("suspect", "non-finite", 8, 8), ("healed", "non-finite", 12, 8)]),
        ("suspect", "non-finite", 15, 15),
        ("spike", "non-finite", 16, 15),
    ]
    assert [step for step, r in enumerate(results) if r.skipped] == [1, 8, 15, 16]
    assert [step for step, r in enumerate(results) if r.gradient_norm is None] == [1, 8, 15, 16]
    assert [step for step, r in enumerate(results) if not np.isfinite(r.loss)] == [1, 15, 16]
    scales = [128.0] * 2 + [64.0] * 7 + [32.0] * 7 + [16.0] if fp16 else [1.0] * 17
    assert [r.loss_scale for r in results] == scales
    assert not any(r.scale_exhausted for r in results)


@pytest.mark.parametrize("what", ["loss", "gradient"])
@pytest.mark.parametrize(
    ("name", "precision"), [("zero0_fp32", None), ("zero1_bf16", {"check_grad_overflow": False})]
)
def test_an_applied_nan_update_is_a_spike_at_once(name, precision, what, run_ranks, tmp_path):
    """The weights are NaN afterwards, even if the loss of the step was finite."""

    def work():
        return watched(build(name, micro=2, precision=precision), 5, tmp_path, **{what: {1}})

    verdict, results, events = run_ranks(2, work)[0]
    assert (verdict, events) == (EXIT_SPIKE, [("spike", "non-finite", 1, 1)])
    assert [record.skipped for record in results] == [False, False]
    assert [record.gradient_norm is None for record in results] == [False, True]
    assert np.isfinite(results[1].loss) == (what == "gradient")


@pytest.mark.parametrize(
    ("precision", "scales"),
    [
        ({"initial_scale_power": 1}, [2.0, 1.0]),
        ({"initial_scale_power": 3, "min_loss_scale": 4, "hysteresis": 2}, [8.0, 8.0, 4.0]),
        ({"initial_scale_power": 2, "min_loss_scale": 4, "hysteresis": 2}, [4.0, 4.0]),
    ],
)
@pytest.mark.parametrize("name", shipped("fp16", fast=["zero1_fp16"]))
def test_an_overflow_at_the_smallest_loss_scale_is_a_spike_not_an_exception(
    name, precision, scales, run_ranks, tmp_path
):
    """Also after a resume, which loads the scaler of the checkpoint."""
    overflows = range(1, 9)

    def work(resumed):
        built = build(name, micro=2, precision=precision)
        if resumed:
            built.load(checkpoints.folder_of(tmp_path, 0))
        else:
            save_engine(built, tmp_path, 0)
        return watched(built, 8, tmp_path / f"run-{resumed}", gradient=overflows)

    for resumed in (False, True):
        (verdict, results, events), (same_verdict, *_) = run_ranks(2, work, resumed)
        assert verdict == same_verdict == EXIT_SPIKE
        assert events[-1] == ("spike", "loss-scale", len(scales), 1)
        assert [record.loss_scale for record in results[1:]] == scales
        assert [record.skipped for record in results] == [False] + [True] * len(scales)
        assert [record.scale_exhausted for record in results] == [False] * len(scales) + [True]


def test_a_batch_without_targets_is_refused(run_ranks):
    def work():
        built, data = build("zero1_fp32", micro=2), batches(2)
        empty = [
            dataclasses.replace(batch, targets=(0,))
            for batch in data.micro_batches(7, built.rank, built.world_size)
        ]
        with pytest.raises(ValueError, match="step 7: the global batch has no targets"):
            one_update(built, empty, data.objective, 1e-3, 7)

    run_ranks(2, work)


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        # Every ZeRO stage and every variant, not every pair.
        ("zero0_fp32", "zero-clap"),
        ("zero1_bf16", "modern"),
        ("zero2_fp32", "zero-clap"),
        ("zero3_bf16", "all"),
    ],
)
def test_activation_checkpointing_computes_layers_twice_with_the_same_bits(
    name, variant, run_ranks
):
    def trained(twice):
        changed = checkpoint_activations if twice else lambda model: None
        built = build(name, 2, 0.1, variant=variant, changed=changed)
        calls = []
        for layer in built._deepspeed.module.encoder.layers:
            layer.attention.register_forward_pre_hook(lambda *_: calls.append(1))
        results = train(built, 2, range(2))
        names = list(built._deepspeed.module.state_dict())
        return results, len(calls), names, built.weights()

    once, twice = run_ranks(2, lambda: [trained(False), trained(True)])[0]
    results, calls, names, weights = once
    again, more_calls, same_names, same_weights = twice
    assert more_calls == 2 * calls > 0
    assert again == results
    assert same_names == names
    assert_same_bits(same_weights, weights)


@pytest.mark.slow
def test_a_compiled_model_trains_alike_with_the_same_names_and_resumes(run_ranks, tmp_path):
    """On one rank: every rank compiles by itself."""

    def straight():
        built = build("zero1_bf16", micro=2, dropout=0.1, changed=compile_layers)
        train(built, 2, range(2))
        save_engine(built, tmp_path, 2)
        return train(built, 2, range(2, 4))

    def resumed():
        built = build("zero1_bf16", micro=2, dropout=0.1, changed=compile_layers)
        built.load(checkpoints.folder_of(tmp_path, 2))
        return train(built, 2, range(2, 4))

    expected = run_ranks(1, straight)[0]
    assert run_ranks(1, resumed)[0] == expected
    assert weights_of(tmp_path, 2).keys() == fresh_model(0.0).state_dict().keys()
    run, case = tmp_path / "fp32", {"steps": 2, "variant": "basis of latents"}  # its layers differ
    work = functools.partial(train_and_save, run, "zero1_fp32", changed=compile_layers, **case)
    assert_like_plain(run_ranks(1, work)[0], run, **case)


def test_every_process_group_has_deepspeeds_timeout(run_ranks):
    from deepspeed.constants import default_pg_timeout

    def work():
        built = build("zero1_fp32", micro=4)
        groups = [torch.distributed.group.WORLD, built._deepspeed.seq_data_parallel_group]
        cpu = torch.device("cpu")
        return [group._get_backend(cpu).options._timeout for group in groups]

    assert run_ranks(2, work)[0] == [default_pg_timeout] * 2


def test_start_flushes_denormal_numbers(run_ranks):
    """They are slow on a CPU, and ALiBi produces many."""

    def work():
        before = float(torch.tensor([2e-38]) / 4)
        engine.start()
        return before, float(torch.tensor([2e-38]) / 4)

    assert run_ranks(1, work) == [(pytest.approx(5e-39), 0.0)]


def test_start_up_compiles_no_op_and_asks_for_no_compiler(run_ranks, tmp_path, monkeypatch):
    import deepspeed.ops

    # It fills the private table that `start` replaces; this fails when DeepSpeed moves it.
    monkeypatch.setattr(deepspeed.ops, "_probe_compatible_ops", lambda: 1 / 0)

    def work():
        os.environ["TORCH_EXTENSIONS_DIR"] = str(tmp_path)
        train(build("zero1_fp32", micro=4), 4, range(1))
        from deepspeed.comm import comm

        return comm.cdb.get_world_size()

    assert run_ranks(2, work) == [2, 2]
    assert list(tmp_path.iterdir()) == []
