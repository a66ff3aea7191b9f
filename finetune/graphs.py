"""CUDA graphs of a classifier's training passes.

A batch of fine-tuning is small: a GPU computes its kernels faster than the host launches them. A
graph launches all of a pass at once.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from pretrain.model.classification import Classifier
from pretrain.model.config import ModelConfig

GRAPH_MULTIPLE = 32
"""Inputs are padded to a multiple of so many tokens, so that a graph serves several lengths."""


def can_replay(model: ModelConfig, stage: int) -> bool:
    """Return whether a model's weights keep their place, and its function ignores the padding.

    ZeRO 3 gathers the weights anew for each pass, and latents depend on the padding in number.
    """
    return stage < 3 and not model.latents


def replay_passes(classifier: Classifier) -> None:
    """Replay the forward and the backward pass of a classifier in training as CUDA graphs.

    They are captured when the first batch of a shape comes, and have the bits of the same passes
    without graphs. Each keeps gradients of its own for all weights.

    Args:
        classifier: on a GPU, with the weights that are trained; see `can_replay`.
    """
    compute, longest = classifier.forward, classifier.encoder.config.longest_input
    pool = torch.cuda.graph_pool_handle()  # of all: one batch's passes end before another's begin
    captured: dict[torch.Size, Callable[..., Tensor]] = {}
    # Gradients are handed over on the stream of the first capture, which is meant.
    torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)

    def forward(
        input_ids: Tensor, document_ids: Tensor | None, segment_ids: Tensor | None = None
    ) -> Tensor:
        if not classifier.training:
            return compute(input_ids, document_ids, segment_ids)
        if document_ids is None:
            document_ids = torch.ones_like(input_ids, dtype=torch.bool)
        length = input_ids.shape[1]
        padded = -(-length // GRAPH_MULTIPLE) * GRAPH_MULTIPLE
        extra = min(padded, longest or padded) - length
        given = (input_ids, document_ids, segment_ids)
        inputs = [F.pad(each, (0, extra)) for each in given if each is not None]
        shape = inputs[0].shape
        if shape not in captured:
            passes = nn.Module()  # among whose parameters torch finds the trained weights
            passes.classifier, passes.forward = classifier, compute
            captured[shape] = _capture(passes, inputs, pool)
        return captured[shape](*inputs)

    classifier.forward = forward  # type: ignore[method-assign]


def _capture(passes: nn.Module, inputs: Sequence[Tensor], pool: Any) -> Any:  # noqa: ANN401
    # Dropout of the batch begins where it does without a capture, which draws numbers too.
    with torch.random.fork_rng([inputs[0].device]):
        return torch.cuda.make_graphed_callables(
            passes, tuple(inputs), allow_unused_input=True, pool=pool
        )
