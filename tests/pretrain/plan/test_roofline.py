"""The roofline: its work is what torch counts, and its times are near what was measured."""

import collections
import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

from pretrain.__main__ import main
from pretrain.checks.devices import DEVICES
from pretrain.config import load as recipes
from pretrain.model.attention import AttentionContext
from pretrain.model.config import VOCABULARY_MULTIPLE
from pretrain.model.heads import build_head
from pretrain.model.language_model import LanguageModel
from pretrain.model.layers import EncoderLayer, checkpoint_activations
from pretrain.model.positions import position_module
from pretrain.objectives.base import Block, Vocabulary
from pretrain.objectives.tokens import summed_loss
from pretrain.plan import plan, roofline

NO_DROPOUT = "model.overrides.attention_dropout=0"


def loaded(*words):
    config = recipes.load("pile-base", words)
    return config, plan.model_of(config)


class Count(TorchDispatchMode):
    """FLOPs and bytes of all operations, by whether they are matrix products, attention or others.

    A view costs nothing, and an expanded dimension is read once.
    """

    def __init__(self):
        super().__init__()
        self.flops, self.bytes = collections.Counter(), collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name, packet = func._schema.name.partition("::")[2], func._overloadpacket
        if func.is_view or name in ("detach", "_unsafe_view", "empty", "empty_like", "new_empty"):
            return out
        kind = "matrices" if name in ("mm", "addmm", "bmm") else "others"
        kind = "attention" if "attention" in name else kind
        if packet in flop_registry:
            self.flops[kind] += flop_registry[packet](*args, **(kwargs or {}), out_val=out)
        found = [t for t in tree_iter((args, kwargs, out)) if isinstance(t, torch.Tensor)]
        self.bytes[kind] += sum(touched(t) for t in {id(t): t for t in found}.values())
        return out


def touched(tensor):
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.element_size() * int(np.prod([size for size, stride in sizes if stride]))


def fused_attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False):
    """What scaled_dot_product_attention calls on a GPU; on "meta" it computes all scores."""
    shape = *query.shape[:3], key.shape[2]
    bias = None if attn_mask is None else attn_mask.expand(shape)
    return torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, True, dropout_p, is_causal
    )[0]


def fused_dropout(x, p, training, inplace):
    """What dropout calls on a GPU: one operation, and a mask of one byte for each number."""
    return torch.native_dropout(x, p, True)[0] if p else x


@pytest.mark.parametrize(
    "words",
    [
        ["model.variant=baseline"],
        ["model.variant=learned-clap", "model.size=large"],
        ["model.variant=zero-clap"],
        ["model.variant=modern", "data.sequence_length=1024"],
        ["model.variant=causal-rotary", "objective.name=causal-lm", "data.packing=contiguous"],
        ["model.variant=baseline", "training.activation_checkpointing=true"],
    ],
    ids=lambda words: " ".join(words),
)
def test_the_work_of_a_micro_batch_is_what_torch_counts(words, monkeypatch):
    """Within 5 %, of a forward and backward pass without a compiler."""
    monkeypatch.setattr(F, "scaled_dot_product_attention", fused_attention)
    monkeypatch.setattr(F, "dropout", fused_dropout)
    config, model = loaded("batch.micro_batch_size=8", *words)
    rows, length = config.batch.micro_batch_size, config.data.sequence_length
    with torch.device("meta"):
        built = LanguageModel(model, VOCABULARY_MULTIPLE).to(torch.bfloat16).train()
    if config.training.activation_checkpointing:
        checkpoint_activations(built)
    objective = config.objective.build(Vocabulary(50265, model.vocab_size, None))
    blocks = [Block(np.append(0, np.full(length - 1, 7)))] * rows
    arrays = objective.collate(blocks, [(0, 0, row) for row in range(rows)], length)
    batch = {name: torch.from_numpy(array).to("meta") for name, array in arrays.items()}
    with Count() as counted:
        objective.loss(built, batch).sum().backward()
    found = roofline.work(config, model, "dense", compiled=False, width=2)
    assert found.matrices == pytest.approx(counted.flops["matrices"], rel=0.05)
    assert found.attention == pytest.approx(counted.flops["attention"], rel=0.05)
    assert found.elementwise == pytest.approx(counted.bytes["others"], rel=0.05)


def bytes_of_kernels():
    """Return a list that will hold what the compiler counts for its own kernels, of each graph.

    Bytes read and written. For a process of its own.
    """
    import torch._inductor.config
    import torch._inductor.graph

    torch._inductor.config.force_disable_caches = True
    found = []
    compile_to_module = torch._inductor.graph.GraphLowering._compile_to_module

    def counted(graph):
        module = compile_to_module(graph)
        own = [n for n in graph.scheduler.nodes if "ExternKernel" not in type(n).__name__]
        found.append(sum(node.get_read_write_buffers_sizes() for node in own))
        return module

    torch._inductor.graph.GraphLowering._compile_to_module = counted
    return found


@pytest.mark.slow  # compiles C++
@pytest.mark.parametrize(
    "words",
    [
        ["model.variant=baseline"],
        ["model.variant=zero-clap"],
        ["model.variant=modern", "model.overrides.local_window=0"],
    ],
    ids=lambda words: " ".join(words),
)
def test_a_compiled_layer_moves_what_the_compiler_counts(words, run_ranks):
    _, model = loaded(NO_DROPOUT, *words)
    rows, length = 2, 512

    def work():
        found = bytes_of_kernels()
        rotation = position_module(model.method.rotation, model)
        context = AttentionContext(rotation=rotation and rotation(torch.arange(length)))
        layer = EncoderLayer(model).to(torch.bfloat16).train()
        layer.compile(dynamic=False)
        x = torch.randn(rows, length, model.hidden_size, dtype=torch.bfloat16, requires_grad=True)
        y = layer(x, context)
        y.backward(torch.randn_like(y))
        return found

    (found,) = run_ranks(1, work)
    passes = roofline._COMPILED
    numbers = roofline._attention_passes(model, passes) * model.hidden_size
    numbers += roofline._passes_after(model, passes)
    assert len(found) == 2  # forward and backward
    assert sum(found) == pytest.approx(2 * rows * length * numbers, rel=0.05)


@pytest.mark.slow  # compiles C++
@pytest.mark.parametrize("variant", ["baseline", "zero-clap"])
def test_the_compiled_head_and_loss_move_what_the_compiler_counts(variant, run_ranks):
    """Within 15 %: of a full micro-batch these are less than a tenth."""
    config, _ = loaded(f"model.variant={variant}")
    model = config.architecture(8192)
    targets, rows = 2048, 8192

    def work():
        found = bytes_of_kernels()
        head = build_head(model).to(torch.bfloat16)
        head.compile(dynamic=False)
        loss = torch.compile(summed_loss, dynamic=False)
        features, table = (
            torch.randn(n, model.hidden_size, dtype=torch.bfloat16, requires_grad=True)
            for n in (targets, rows)
        )
        loss(head(features, table), torch.randint(0, 8000, (targets,))).backward()
        return found

    (found,) = run_ranks(1, work)
    passes = roofline._COMPILED
    numbers = passes.logits * targets * rows
    if model.normalize_embeddings:
        numbers += passes.normalized_table * rows * model.hidden_size
    assert sum(found) == pytest.approx(2 * numbers, rel=0.15)


@pytest.mark.parametrize(
    ("words", "has_mask", "milliseconds"),
    [
        (["pile-base", "model.variant=baseline", "training.compile=false"], True, 437.1),
        (["pile-base", "model.variant=zero-clap", "training.compile=false"], True, 471.8),
        (["pile-base", "model.variant=zero-clap"], True, 418.9),
        (["pile-base", "model.variant=baseline"], False, 336.5),
        (["pile-base-fast", "model.variant=baseline"], False, 277.8),
        (["pile-base-fast", "model.variant=zero-clap"], False, 275.9),
    ],
    ids=str,
)
def test_the_expected_time_is_near_what_an_h100_took(words, has_mask, milliseconds):
    """`bench` on an H100 80GB HBM3, torch 2.11, 2026-11-26: updates of 4 x 16 x 2048 tokens.

    Full rows had a mask of keys in the first three, as rows with padding have.
    """
    name, *overrides = words
    config = recipes.load(name, ["batch.global_batch_size=64", *overrides])
    model = plan.model_of(config)
    expected = roofline.expect(config, model, 1, "h100", in_bench=not has_mask).seconds
    assert expected == pytest.approx(milliseconds / 1e3, rel=0.05)


def test_parts_of_the_time_follow_the_number_of_gpus_the_stage_and_the_batch():
    def parts(*words, gpus=8):
        config, model = loaded(*words)
        return roofline.expect(config, model, gpus, "a100").parts

    one, eight, sixteen = (parts(gpus=gpus) for gpus in (1, 8, 16))
    for name in ("matrices", "attention", "elementwise"):
        assert eight[name] == pytest.approx(one[name] / 8)
    assert one["communication"] == 0
    assert eight["optimizer"] == pytest.approx(one["optimizer"] / 8, rel=1e-6)
    assert sixteen["communication"] > 8 * eight["communication"]  # a network is slower than NVLink
    by_stage = [parts(f"training.deepspeed=zero{stage}_bf16") for stage in (1, 2, 3)]
    spent = [found["communication"] for found in by_stage]
    assert spent == sorted(set(spent))
    small = parts("model.size=small", "data.sequence_length=128", "batch.micro_batch_size=1")
    assert max(small, key=small.get) == "launches"


@pytest.mark.parametrize("path", sorted(recipes.RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
@pytest.mark.parametrize("kind", DEVICES)
def test_no_recipe_is_expected_to_be_faster_than_the_data_sheet(path, kind):
    config = recipes.load(path.stem)
    planned = plan.plan(config, 1, kind)
    assert 0 < planned.flops / planned.seconds < 0.8 * DEVICES[kind].flops
    assert sum(planned.parts.values()) == pytest.approx(planned.seconds)


@pytest.mark.parametrize(
    ("words", "setting"),
    [
        ([], "model.overrides.attention_dropout=0"),
        (["training.attention_backend=dense", "training.compile=false"], "training.compile=auto"),
        (["training.deepspeed=zero2_bf16_offload", NO_DROPOUT], "training.deepspeed=zero1_bf16"),
        (["training.deepspeed=zero1_fp32"], "training.deepspeed=zero1_bf16"),
        (
            ["model.size=small", "batch.micro_batch_size=1", "data.sequence_length=128"],
            "batch.micro_batch_size=64",
        ),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, list) else "",
)
def test_the_change_that_would_help_most_is_named_and_does_help(words, setting):
    change = plan.plan(loaded(*words)[0], 8, "h100").change
    assert change.setting == setting
    changed = plan.plan(loaded(*words, setting)[0], 8, "h100")
    assert changed.seconds == pytest.approx(change.seconds)


def test_a_change_that_does_not_fit_or_hardly_helps_is_not_named():
    fast = recipes.load("pile-base-fast")
    assert plan.plan(fast, 8, "h100").change is None
    needed = recipes.load("pile-large", ["training.activation_checkpointing=true"])
    words = ["batch.micro_batch_size=64", NO_DROPOUT]
    big = recipes.load("pile-large", [*words, "training.activation_checkpointing=true"])
    assert plan.plan(needed, 8, "h100").change is not None
    assert plan.plan(big, 8, "a100-40gb").change is None


def test_the_command_says_what_bounds_the_speed(tmp_path, capsys):
    path = tmp_path / "plan.json"
    assert main(["plan", "pile-base", "--kind", "h100", "--details", "--json", str(path)]) == 0
    printed, written = capsys.readouterr().out, json.loads(path.read_text())
    most = max(written["parts"], key=written["parts"].get)
    assert f"spent on     {most} " in printed
    assert "faster       model.overrides.attention_dropout=0 would help most: " in printed
    speed = written["tokens"] / written["seconds"]
    assert f"speed        {speed:,.0f} tokens/s, {speed / 8:,.0f} of each GPU" in printed
