"""Workarounds that need no engine, or a fresh process; the others are tested with the engine."""

import warnings

import pytest
import torch

from tests.running import python

COMPILER = """
import sys, torch
compiled = []
torch.compile = compile = lambda function: compiled.append(function) or function
from pretrain.engine import workarounds
workarounds.import_without_compiler()
assert torch.compile is compile
assert "deepspeed.runtime.zero.muon.original_muon" in sys.modules
assert not compiled, compiled
weight = torch.nn.Parameter(torch.ones(2))
weight.sum().backward()
optimizer = torch.optim.AdamW([{"params": [weight]}], lr=0.5, weight_decay=0, fused=True)
optimizer.step()
optimizer.zero_grad()
optimizer.load_state_dict(optimizer.state_dict())
assert (weight < 0.6).all()
assert "torch._dynamo" not in sys.modules
"""


@pytest.mark.slow
def test_functions_of_others_are_imported_without_the_compiler():
    python("-c", COMPILER)


def test_only_the_warning_about_renamed_collectives_is_silenced(run_ranks):
    """DeepSpeed's calls would put it into the log of each attempt, for each rank."""

    def heard():
        from pretrain.engine.engine import start

        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            start()
            one = torch.ones(1)
            torch.distributed.all_gather_into_tensor(one.clone(), one)
            torch.distributed.reduce_scatter_tensor(one.clone(), one)
            warnings.warn("`torch.distributed.other` is deprecated.", FutureWarning, stacklevel=1)
        return [str(each.message) for each in found if each.category is FutureWarning]

    assert run_ranks(1, heard) == [["`torch.distributed.other` is deprecated."]]


class AsPython311Writes:
    """A member of an enum, or an attribute of anything, as 3.11.0 to 3.11.3 pickle members."""

    def __init__(self, owner, name):
        self.reduced = getattr, (owner, name)

    def __reduce__(self):
        return self.reduced


def test_a_stage_that_an_early_python_3_11_wrote_is_read_and_no_other_attribute(tmp_path):
    from deepspeed.runtime.zero.config import ZeroStageEnum

    from pretrain.engine import workarounds

    path = tmp_path / "states.pt"
    torch.save({"zero_stage": AsPython311Writes(ZeroStageEnum, "gradients")}, path)
    with workarounds.load_without_code():
        assert torch.load(path) == {"zero_stage": ZeroStageEnum.gradients}
    torch.save(AsPython311Writes(torch.storage.UntypedStorage, "from_file"), path)
    with (
        workarounds.load_without_code(),
        pytest.raises(ValueError, match=r"states\.pt: was not loaded, because it may run code"),
    ):
        torch.load(path)
