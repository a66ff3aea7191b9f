"""Two updates of a recipe on one rank of several, each configuration of DeepSpeed in turn.

    python -m tests.gpu.rehearsal.engine RANK WORLD_SIZE RECIPE [key=value ...] -- NAME ...

Prints a line of JSON for each NAME: what the second update does, and what `plan` says it needs.
"""

import dataclasses
import functools
import os
import sys

from tests.gpu.rehearsal import device  # first: before torch

rank, world_size = map(int, sys.argv[1:3])
os.environ.update(
    DS_ACCELERATOR="cuda",
    RANK=str(rank),
    WORLD_SIZE=str(world_size),
    LOCAL_RANK="0",
    LOCAL_WORLD_SIZE=str(world_size),
    MASTER_ADDR="127.0.0.1",
    MASTER_PORT="0",
    TORCH_CUDA_ARCH_LIST="9.0",
)
device.pretend("h100")

import deepspeed  # noqa: E402
import torch  # noqa: E402
from deepspeed.runtime.zero import partitioned_param_coordinator  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.nn.attention import flex_attention as library  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from pretrain.config import load  # noqa: E402
from pretrain.engine.distributed import Process  # noqa: E402
from pretrain.engine.engine import Engine, deepspeed_json  # noqa: E402
from pretrain.loop.protocols import Ahead  # noqa: E402
from pretrain.model import flex  # noqa: E402
from pretrain.model.backends import choose_backend  # noqa: E402
from pretrain.model.config import VOCABULARY_MULTIPLE  # noqa: E402
from pretrain.model.language_model import LanguageModel  # noqa: E402
from pretrain.objectives.base import Vocabulary  # noqa: E402
from pretrain.plan import plan  # noqa: E402
from tests.gpu.rehearsal.batches import Batches  # noqa: E402
from tests.gpu.rehearsal.recorder import Recorder  # noqa: E402

UPDATES = 2


def rehearse(words: list[str], name: str) -> dict[str, object]:
    config = load.load(words[0], [*words[1:], f"training.deepspeed={name}"])
    architecture = plan.model_of(config)
    planned = plan.plan(config, world_size, "h100")
    backend = choose_backend(architecture, config.training.attention_backend, on_gpu=True)
    vocab_size = plan.vocabulary_size(config)
    vocabulary = Vocabulary(vocab_size, architecture.vocab_size, None)
    objective = config.objective.build(vocabulary, compiled=False)
    count = config.batch.accumulation_steps(world_size)
    batches = Batches(config, objective, vocab_size, count)
    made = batches.micro_batches(0, rank, world_size)
    counts = 1000, *(100 for _ in objective.terms)
    settings = deepspeed_json(name, config.batch, config.optimizer.gradient_clipping, world_size)
    recorder = Recorder()
    with FakeTensorMode(allow_non_fake_inputs=True), recorder:
        model = LanguageModel(architecture, VOCABULARY_MULTIPLE, backend)
        process = Process(rank, world_size, 0, world_size)
        engine = Engine(model, config.optimizer, settings, process)
        for step in range(UPDATES):
            recorder.begin()
            # As the loop has it: the next batch is counted in this step.
            engine.step(made, objective, 1e-4, 0, step, counts=counts, ahead=lambda: Ahead(made))
    memory = planned.memory[planned.stage]
    return {
        "waits": dict(recorder.waits),
        "synchronisations": dict(device.SYNCHRONISATIONS),
        "blocking": dict(recorder.blocking),
        "collectives": recorder.collectives,
        "peak": recorder.peak,
        "planned": memory.on_device,
        "parts": dataclasses.asdict(memory),
    }


if __name__ == "__main__":
    # Ranks compare numbers here, of which there is one rank's.
    partitioned_param_coordinator.assert_ints_same_as_other_ranks = lambda *arguments: None
    # FlexAttention as one operation, without its compiler.
    library._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True
    flex._kernel = lambda: library.flex_attention
    torch.distributed.init_process_group(
        "fake", rank=rank, world_size=world_size, store=FakeStore()
    )
    deepspeed.init_distributed(dist_backend="nccl", verbose=False)
    cut = sys.argv.index("--")
    device.tell(functools.partial(rehearse, sys.argv[3:cut]), sys.argv[cut + 1 :])
