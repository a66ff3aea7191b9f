"""What a rehearsal without a GPU has found, measured on one (tests/gpu/rehearsal)."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pretrain.checks.recipe import check_device, check_settings
from tests.gpu.attention import Case, gradients, ids_of, mixed, score_bias, sees_a_key
from tests.gpu.conftest import SETTINGS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default"),
    pytest.mark.usefixtures("fresh_kernels"),
]
LENGTH = 512


def drawn(*shape, seed, device, dtype):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return values.to(device, dtype)


def inputs(case, device, dtype, batch=2, length=LENGTH, heads=4):
    """qkv, ids, and weights of the output."""
    qkv = drawn(batch, length, 3, heads, case.head_size, seed=1, device=device, dtype=dtype)
    ids = ids_of(case.mask, batch, length)
    weights = drawn(batch, length, heads, case.head_size, seed=2, device=device, dtype=dtype)
    return qkv, None if ids is None else ids.to(device), weights


class Kernels(TorchDispatchMode):
    """Names of the kernels of scaled_dot_product_attention that are called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name()
        if "scaled_dot_product" in name or "flash_attention" in name:
            self.names.append(name.removeprefix("aten::"))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize(
    "case", [Case("alibi", mask="padding"), Case("none", mask="none")], ids=str
)
def test_dense_attention_is_a_fused_kernel_with_bias_and_with_dropout(case, dropout, device):
    """Unfused, a layer would keep several tensors of the size of all scores."""
    qkv, ids, weights = inputs(case, device, torch.bfloat16)
    module = score_bias(case, 4, device)
    with Kernels() as seen:
        mixed(case, "dense", module, qkv.requires_grad_(), ids, dropout).backward(weights)
    print(f"{case}, dropout {dropout}: {', '.join(seen.names)}")
    if device.type == "cpu" and dropout:
        pytest.skip("a CPU has no fused kernel with dropout")
    assert len(seen.names) == 2  # forward and backward: without one, operations of other names


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", ["dense", "flex"])
@pytest.mark.parametrize("position", ["none", "alibi"])
def test_a_query_that_sees_no_key_disturbs_nothing(position, backend, dtype, device):
    """Padding beyond the window of the tokens, and a row that is padding only."""
    case = Case(position, mask="padding", window=64)
    qkv, ids, weights = inputs(case, device, dtype, batch=3)
    ids[2] = False
    sees = sees_a_key(case, ids.cpu(), LENGTH)
    assert not sees.all()
    assert sees.any()
    # The loss reads no padding.
    weights = weights * ids[:, :, None, None]
    module = score_bias(case, 4, device)
    found = gradients(case, backend, module, qkv, ids, weights)
    cpu = [x.double().cpu() for x in (qkv, weights)]
    expected = gradients(case, "dense", score_bias(case, 4, "cpu"), cpu[0], ids.cpu(), cpu[1])
    assert all(bool(x.isfinite().all()) for x in found)
    output, of_output = (x[0].double().cpu()[sees] for x in (found, expected))
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    assert float((output - of_output).norm()) < tolerance * float(of_output.norm())
    gradient, of_gradient = (x[1].double().cpu() for x in (found, expected))
    assert float((gradient - of_gradient).norm()) < tolerance * float(of_gradient.norm())


def is_refused(recipe, folder, *words):
    config = recipe.load(folder, *SETTINGS, *words)
    try:
        check_settings(config)
        check_device(config, 1, "cuda")
    except ValueError as error:
        assert "deterministic" in str(error)  # noqa: PT017 - any other refusal is an error
        return True
    return False


@pytest.mark.parametrize("backend", ["dense", "flex"])
@pytest.mark.parametrize(
    "case", [Case("alibi"), Case("alibi", slopes="trained"), Case("t5-bias")], ids=str
)
def test_deterministic_attention_repeats_its_bits_or_is_refused(
    case, backend, recipe, device, tmp_path
):
    overrides = {"position": case.position, "alibi_slopes": case.slopes}
    words = [f"model.overrides.{name}={value}" for name, value in overrides.items()]
    refused = is_refused(recipe, tmp_path, *words, f"training.attention_backend={backend}")
    if backend == "flex" and device.type == "cpu" and case.is_trained:
        pytest.skip("FlexAttention without a compiler gives a trained bias no gradient")
    torch.use_deterministic_algorithms(True)
    try:
        tensors = inputs(case, device, torch.bfloat16)
        module = score_bias(case, 4, device)
        runs = [gradients(case, backend, module, *tensors) for _ in range(5)]
    finally:
        torch.use_deterministic_algorithms(False)
    same = all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))
    print(f"{case} on {backend}: {'the same bits' if same else 'other bits'}; refused: {refused}")
    assert same or refused
