"""A compiled micro-batch, forward and backward, for a GPU: launches, waits, compilations.

    python -m tests.gpu.rehearsal.step a100|h100 RECIPE [key=value ...]

Prints a line of JSON. once: at the recipe's length. lengths: training and evaluation at two
lengths, in turn, twice.
"""

import dataclasses
import sys

from tests.gpu.rehearsal import device  # first: before torch

properties = device.pretend(sys.argv[1])

import torch  # noqa: E402
from torch._dynamo.utils import counters  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from pretrain.config import load  # noqa: E402
from pretrain.config.run import RunConfig  # noqa: E402
from pretrain.model import flex  # noqa: E402
from pretrain.model.backends import choose_backend  # noqa: E402
from pretrain.model.config import VOCABULARY_MULTIPLE  # noqa: E402
from pretrain.model.language_model import LanguageModel  # noqa: E402
from pretrain.model.layers import compile_layers  # noqa: E402
from pretrain.objectives.base import Vocabulary  # noqa: E402
from pretrain.plan import plan  # noqa: E402
from pretrain.plan.speed import random_batch  # noqa: E402
from tests.gpu.rehearsal import kernels  # noqa: E402
from tests.gpu.rehearsal.recorder import Recorder  # noqa: E402

LENGTHS = 128, 256


def once(config: RunConfig, model, objective, recorder: Recorder) -> dict[str, object]:
    inputs = batch(config, objective)
    for _ in range(2):  # the first compiles
        kernels.LAUNCHES.clear()
        model.zero_grad(set_to_none=True)
        recorder.begin()
        objective.loss(model, inputs).sum().backward()
    return {
        "kernels": kernels.KERNELS,
        "compiled": sum(kernels.LAUNCHES.values()),
        "others": recorder.kernels,
        "waits": dict(recorder.waits),
    }


def lengths(config: RunConfig, model, objective, recorder: Recorder) -> dict[str, object]:
    kernels.CachingAutotuner.precompile = lambda *arguments, **keywords: None  # not looked at
    compiled = []
    for length in LENGTHS * 2:
        data = dataclasses.replace(config.data, sequence_length=length)
        inputs = batch(dataclasses.replace(config, data=data), objective)
        model.train()
        objective.loss(model, inputs).sum().backward()
        model.eval()
        with torch.no_grad():
            subsets = torch.zeros_like(inputs["labels"])
            objective.evaluate(model, {**inputs, "subsets": subsets}, subsets=1)
        compiled.append(counters["stats"]["unique_graphs"])
    return {"graphs": compiled}


def batch(config: RunConfig, objective) -> dict[str, torch.Tensor]:
    made = random_batch(config, objective, plan.vocabulary_size(config), 0)
    return made.to(torch.device("cuda"))


def measured(words: list[str]) -> dict[str, object]:
    config = load.load(words[0], words[1:])
    vocab_size = plan.vocabulary_size(config)
    architecture = config.architecture(vocab_size)
    backend = choose_backend(architecture, config.training.attention_backend, on_gpu=True)
    objective = config.objective.build(Vocabulary(vocab_size, architecture.vocab_size, None))
    found = {}
    for action in (once, lengths):
        torch.compiler.reset()
        flex._kernel.cache_clear()
        counters.clear()
        recorder = Recorder()
        with FakeTensorMode(allow_non_fake_inputs=True), recorder:
            with torch.device("cuda"):
                model = LanguageModel(architecture, VOCABULARY_MULTIPLE, backend).to(torch.bfloat16)
            compile_layers(model.train())
            results = action(config, model, objective, recorder)
        found[action.__name__] = {"breaks": dict(counters["graph_break"]), **results}
    return found


if __name__ == "__main__":
    kernels.compile_for(properties)
    device.tell(measured, [sys.argv[2:]])
