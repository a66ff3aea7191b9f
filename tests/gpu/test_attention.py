"""Logits and gradients of every back end on the GPU, against `dense` in fp32 on the CPU."""

import functools

import pytest
import torch

from pretrain.model.config import ModelConfig
from pretrain.model.language_model import LanguageModel
from tests.pretrain.model.test_attention import POSITIONS, drawn, masks

# Warnings of torch's compiler on some GPU are no mistake of ours.
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default"),
    pytest.mark.usefixtures("fresh_kernels"),
]
FP32, BF16 = torch.float32, torch.bfloat16
TOLERANCE = {FP32: (1e-4, 1e-4), BF16: (0.03, 0.25)}
"""Largest norm of the error of the logits, and of each gradient, relative to the norm of the
reference. On a CPU bf16 has 0.008 and 0.17; without its bias an ALiBi model has 0.11 and 0.38."""
LENGTH = 331
"""Neither a multiple of a tile of FlexAttention nor of what dense kernels align to."""


def config_of(position, kind, causal):
    return ModelConfig(
        vocab_size=50,
        hidden_size=128,
        num_heads=2,
        num_layers=2,
        intermediate_size=256,
        max_positions=400,
        position=position,
        alibi=kind,
        causal=causal,
        dropout=0.0,
        attention_dropout=0.0,
    )


def trained(config, backend, device, dtype, length, mask):
    """Logits, and the gradient of each parameter, in fp32 on the CPU."""
    torch.manual_seed(0)
    model = LanguageModel(config, attention_backend=backend)
    with torch.no_grad():  # fresh weights hardly attend: without a bias they compute the same
        for layer in model.encoder.layers:
            layer.attention.query_key_value.weight.mul_(4)
            layer.attention.output.weight.mul_(4)
    model.to(device, dtype)
    ids = torch.randint(4, 49, (2, length), generator=torch.Generator().manual_seed(1))
    places = torch.arange(0, 2 * length - 60, 7)
    document_ids = masks(length)[mask]
    if document_ids is not None:
        document_ids = document_ids.to(device)
    logits = model(ids.to(device), document_ids, places.to(device))
    logits.backward(drawn(*logits.shape, seed=2).to(logits))
    named = [(name, p.grad) for name, p in model.named_parameters()]
    # On a CPU the kernel that is not compiled gives a trained bias no gradient.
    on_cpu = device.type == "cpu"
    gradients = {name: g.float().cpu() for name, g in named if not (on_cpu and g is None)}
    return logits.detach().float().cpu(), gradients


@functools.cache
def reference(config, length, mask):
    return trained(config, "dense", torch.device("cpu"), FP32, length, mask)


def check(config, backend, device, dtype, length, mask):
    logits, gradients = trained(config, backend, device, dtype, length, mask)
    expected, all_expected = reference(config, length, mask)
    of_logits, of_gradients = TOLERANCE[dtype]
    assert float((logits - expected).norm()) < of_logits * float(expected.norm())
    for name, gradient in gradients.items():
        error = float((gradient - all_expected[name]).norm())
        assert error < of_gradients * float(all_expected[name].norm()), name


@pytest.mark.parametrize(
    ("backend", "dtype", "causal"),
    [
        ("dense", FP32, False),
        ("dense", BF16, False),
        ("dense", BF16, True),
        ("flex", FP32, False),
        ("flex", BF16, False),
        ("flex", BF16, True),
    ],
)
@pytest.mark.parametrize(("position", "kind"), POSITIONS)
def test_every_position_method_agrees_with_fp32_on_packed_documents(
    position, kind, backend, dtype, causal, device
):
    check(config_of(position, kind, causal), backend, device, dtype, LENGTH, "documents")


@pytest.mark.parametrize("mask", ["none", "padding", "documents"])
@pytest.mark.parametrize("length", [129, 256, 300])
@pytest.mark.parametrize("backend", ["dense", "flex"])
def test_every_length_and_mask_agrees_with_fp32(backend, length, mask, device):
    if mask == "documents" and length < 200:
        pytest.skip("the documents of the mask are longer")
    check(config_of("alibi", "offset", causal=False), backend, device, BF16, length, mask)
