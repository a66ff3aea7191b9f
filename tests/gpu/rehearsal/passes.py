"""A classifier's passes as a graph captures them: launches, and waits and copies of the host.

    python -m tests.gpu.rehearsal.passes a100|h100

Prints a line of JSON for each variant.
"""

import sys

from tests.gpu.rehearsal import device  # first: before torch

device.pretend(sys.argv[1])

import torch  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from finetune import graphs  # noqa: E402
from finetune.tasks import TASKS, Objective  # noqa: E402
from pretrain.model import presets  # noqa: E402
from pretrain.model.classification import ClassificationConfig, ClassificationHead, Classifier  # noqa: E402
from pretrain.model.language_model import LanguageModel  # noqa: E402
from tests.gpu.rehearsal.recorder import Recorder  # noqa: E402


def captured(variant: str) -> dict[str, object]:
    recorder, found = Recorder(), {}

    def capture(module, inputs, **options):
        for _ in range(2):  # the first warms up
            recorder.begin()
            output = module(*inputs)
            torch.autograd.grad(
                output, tuple(module.parameters()), torch.empty_like(output), allow_unused=True
            )
        found.update(launches=recorder.kernels, waits=dict(recorder.waits))
        return module

    torch.cuda.make_graphed_callables, torch.cuda.graph_pool_handle = capture, lambda: None
    with FakeTensorMode(allow_non_fake_inputs=True), recorder:
        with torch.device("cuda"):
            architecture = presets.build("base", variant, 50304, {"num_layers": 2})
            pooling = "mean" if architecture.causal else "first"
            head = ClassificationHead(
                architecture.hidden_size, ClassificationConfig(2, pooling=pooling)
            )
            classifier = Classifier(LanguageModel(architecture).encoder, head).to(torch.bfloat16)
            batch = {"input_ids": torch.ones(16, 20, dtype=torch.int64)}
            batch |= {"document_ids": batch["input_ids"] > 0, "labels": torch.ones(16).long()}
            batch |= {"segment_ids": batch["input_ids"]} if architecture.segments else {}
        graphs.replay_passes(classifier.train())
        Objective(TASKS["CoLA"]).loss(classifier, batch)
    return found


if __name__ == "__main__":
    device.tell(captured, presets.VARIANTS)
