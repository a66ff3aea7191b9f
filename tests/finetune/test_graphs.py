"""Fine-tuning by graphs, with a node of autograd in the place of torch's graphs, which need a GPU.

tests/gpu has the same with graphs.
"""

from types import SimpleNamespace

import pytest
import torch

from finetune import graphs, train
from finetune.config import FinetuneConfig
from pretrain.model import presets
from pretrain.model.classification import ClassificationConfig, ClassificationHead, Classifier
from pretrain.model.language_model import LanguageModel
from tests.finetune.conftest import losses_of, plans, train_on

SHORT = ["epochs=1", "max_train_examples=64"]


class Replayed(torch.autograd.Function):
    """The node that `torch.cuda.make_graphed_callables` makes of a module.

    As there, each replay writes the output and the gradients to the memory of the one before.
    """

    @staticmethod
    def forward(ctx, module, weights, static, *inputs):
        with torch.enable_grad():
            ctx.output, ctx.weights = module(*inputs[: len(inputs) - len(weights)]), weights
        ctx.static = static
        return written(static, "output", [ctx.output])[0]

    @staticmethod
    def backward(ctx, gradient):
        found = torch.autograd.grad(ctx.output, ctx.weights, gradient, allow_unused=True)
        gradients = written(ctx.static, "gradients", found)
        return (*[None] * (len(ctx.needs_input_grad) - len(found)), *gradients)


def written(static, name, tensors):
    """Write to the tensors of that name, made at first, and return them without their history."""
    made = static.setdefault(name, [None if t is None else t.detach().clone() for t in tensors])
    for tensor, new in zip(made, tensors, strict=True):
        if new is not None:
            tensor.copy_(new.detach())
    return [None if tensor is None else tensor.detach() for tensor in made]


def replayed(module, inputs, allow_unused_input, pool):
    module(*inputs)  # as torch does first: it draws dropout
    weights, static = tuple(module.parameters()), {}
    return lambda *given: Replayed.apply(module, weights, static, *given, *weights)


def is_kept(weight):
    """Whether anything holds the end of autograd's graphs at a weight."""
    torch.autograd.graph.get_gradient_edge(weight).node.metadata["seen"] = True
    return "seen" in torch.autograd.graph.get_gradient_edge(weight).node.metadata


def trained(run_ranks, plan, folder, graphed):
    """The losses of a run whose passes are replayed, or only padded; and the shapes captured."""
    shapes = []

    def capture(module, inputs, **options):
        # One from before would be on the default stream, and a capture that meets it fails.
        assert not any(map(is_kept, module.parameters()))
        shapes.append(tuple(inputs[0].shape))
        return replayed(module, inputs, **options) if graphed else module

    def run():
        make = train._engine

        def engine(config, classifier, process):
            made = make(config, classifier, process)
            graphs.replay_passes(classifier)
            return made

        train._engine, torch.cuda.graph_pool_handle = engine, lambda: None
        torch.cuda.make_graphed_callables = capture
        torch.cuda.get_rng_state = lambda device: torch.get_rng_state()
        torch.cuda.set_rng_state = lambda state, device: torch.set_rng_state(state)
        train.train(plan, folder)
        return shapes

    plan.write(folder)
    (found,) = run_ranks(1, run)
    return losses_of(folder), found


@pytest.mark.parametrize("stage", ["zero0_fp32", "zero2_bf16"])
def test_replayed_passes_have_the_bits_of_the_same_passes(
    stage, run_ranks, segment_model, easy_glue, tmp_path
):
    """With dropout, and with inputs of two padded lengths."""
    words = [*SHORT, "learning_rate=1e-2", f"deepspeed={stage}", "length_window=1"]
    (plan,) = plans(segment_model, easy_glue, *words, names=["RTE"])
    losses, shapes = trained(run_ranks, plan, tmp_path / "replayed", True)
    expected, _ = trained(run_ranks, plan, tmp_path / "plain", False)
    assert losses == expected
    assert sorted(shapes) == sorted(set(shapes))
    assert {length % 32 for _, length in shapes} == {0}


def test_padding_changes_no_loss(run_ranks, segment_model, easy_glue, tmp_path):
    words = [*SHORT, "dropout=0", "attention_dropout=0", "pooling=mean"]
    (plan,) = plans(segment_model, easy_glue, *words, names=["RTE"])
    losses, _ = trained(run_ranks, plan, tmp_path / "padded", False)
    train_on(run_ranks, 1, plan, tmp_path / "as-it-is")
    assert losses == pytest.approx(losses_of(tmp_path / "as-it-is"), rel=1e-5)


def test_padding_ends_where_positions_do_and_scoring_has_none(monkeypatch):
    architecture = presets.build("tiny", "baseline", 320, {"max_positions": 40})
    head = ClassificationHead(architecture.hidden_size, ClassificationConfig(2))
    classifier = Classifier(LanguageModel(architecture).encoder, head)
    lengths = []
    classifier.encoder.register_forward_pre_hook(lambda _, given: lengths.append(given[0].shape[1]))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(graphs, "_capture", lambda module, inputs, pool: module)
    graphs.replay_passes(classifier)
    for length in (3, 32, 33, 40):
        classifier(torch.full((2, length), 7), None)
    classifier.eval()(torch.full((2, 33), 7), None)
    assert lengths == [32, 32, 40, 40, 33]


@pytest.mark.parametrize(
    ("device", "deepspeed", "variant", "expected"),
    [
        ("cuda", "", "baseline", True),
        ("cuda", "zero0_fp32", "baseline", True),
        ("cuda", "zero2_bf16", "baseline", True),
        ("cuda", "zero3_bf16", "baseline", False),
        ("cuda", "", "char-perceiver", False),  # latents depend on the padding in number
        ("cpu", "", "baseline", False),
    ],
)
def test_passes_are_replayed_on_a_gpu_where_weights_keep_their_place(
    device, deepspeed, variant, expected, monkeypatch
):
    found = []
    monkeypatch.setattr(train, "Engine", lambda *arguments: None)
    monkeypatch.setattr(train, "replay_passes", found.append)
    encoder = SimpleNamespace(config=presets.build("base", variant, 320, {}))
    classifier = SimpleNamespace(encoder=encoder)
    process = SimpleNamespace(world_size=1, device=torch.device(device))
    train._engine(FinetuneConfig(deepspeed=deepspeed), classifier, process)
    assert found == [classifier] * expected
