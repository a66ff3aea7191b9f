"""Who is measured in `pretrain bench`: updates of our model and of others, on the same batches."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from pretrain.config.run import BatchConfig, OptimizerConfig
from pretrain.objectives.base import Block, PretrainingObjective, Vocabulary
from pretrain.objectives.masked import FIRST_WORD_ID, MaskedLMConfig, labels_by_position

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from pretrain.loop import MicroBatch
    from pretrain.model.config import ModelConfig
    from pretrain.model.language_model import LanguageModel

OURS, PLAIN = "zeroclap", "zeroclap, plain loop"
FLASH = "zeroclap, plain loop, FLASH"
TRANSFORMERS, EAGER = "transformers sdpa", "transformers eager"
ORIGINAL = "the original's way"
LAYOUTS = ("full", "unmasked", "padded", "packed")
_VOCABULARY_MULTIPLE = 128

Update = Callable[["MicroBatch"], object]


@dataclasses.dataclass(frozen=True)
class Case:
    """One thing to measure."""

    contender: str
    size: str
    variant: str
    length: int
    rows: int
    """Of a micro-batch; one is an update."""
    layout: str
    """Rows that are full, and the mask that says so; full without a mask; one text of random length
    a row, padded; several texts a row."""
    vocab_size: int = 50265
    parts: bool = False
    """Measure what the update is made of, too."""
    attention_dropout: bool = False
    """As the variant has it. Without, FlexAttention can compute it."""

    def __post_init__(self) -> None:
        """Refuse shapes without room for text."""
        for name, least in (("length", 8), ("rows", 1), ("vocab_size", 8)):
            value = getattr(self, name)
            if value < least:
                raise ValueError(f"{name.replace('_', '-')} {value}: accepted: {least} or more")

    def architecture(self) -> ModelConfig:
        """The model that is meant.

        Raises:
            ValueError: no such size or variant.
        """
        from pretrain.model import presets

        overrides: dict[str, object] = {"max_positions": self.length}
        if not self.attention_dropout:
            overrides["attention_dropout"] = 0.0
        return presets.build(self.size, self.variant, self.vocab_size, overrides)

    def objective(self) -> PretrainingObjective:
        """Masked language modelling, which every contender knows."""
        import torch

        vocabulary = Vocabulary(self.vocab_size, self.vocab_size - 1, Path())
        return MaskedLMConfig().build(vocabulary, compiled=torch.cuda.is_available())

    def name(self) -> str:
        """For people."""
        return (
            f"{self.contender}: {self.size} {self.variant}, {self.rows} x {self.length}, "
            f"{self.layout}"
        )


def collate(case: Case, step: int) -> MicroBatch:
    """The batch of a step, of random ids."""
    import numpy as np

    from pretrain.loop import MicroBatch

    draw = np.random.default_rng([step, case.length])
    longest = case.length
    lengths = [longest] * case.rows
    if case.layout == "padded":
        lengths = draw.integers(longest // 2, longest + 1, case.rows).tolist()
    rows = [draw.integers(FIRST_WORD_ID, case.vocab_size - 1, length) for length in lengths]
    blocks = [Block(ids) for ids in rows]
    if case.layout == "packed":  # four documents per row, of any lengths
        ends = [np.sort(draw.integers(1, longest, 3)) for _ in rows]
        blocks = [
            Block(ids, 1 + np.searchsorted(cuts, np.arange(longest), "right"))
            for ids, cuts in zip(rows, ends, strict=True)
        ]
    keys = [(0, step, row) for row in range(len(rows))]
    objective = case.objective()
    arrays = objective.collate(blocks, keys, longest)
    if case.layout == "unmasked":
        del arrays["document_ids"]
    return MicroBatch(0, arrays, sum(lengths), objective.targets(arrays))


def model_of(case: Case, device: torch.device) -> LanguageModel:
    """Ours, with fresh weights: FlexAttention on a GPU, where it can be."""
    from pretrain.model.language_model import LanguageModel

    architecture, backend = case.architecture(), "dense"
    if device.type == "cuda" and architecture.attention_dropout == 0:
        backend = "flex-flash" if case.contender == FLASH else "flex"
    return LanguageModel(architecture, _VOCABULARY_MULTIPLE, backend).to(device)


def _through_deepspeed(case: Case, device: torch.device) -> Update:
    from pretrain.engine import engine

    name = "zero1_bf16" if device.type == "cuda" else "zero1_fp32"
    process = engine.start()
    batch = BatchConfig(global_batch_size=case.rows, micro_batch_size=case.rows)
    settings = engine.deepspeed_json(name, batch, 0.0, process.world_size)
    built = engine.Engine(
        model_of(case, device),
        OptimizerConfig(),
        settings,
        process,
        compiled=device.type == "cuda",
    )
    objective = case.objective()
    return lambda batch: built.step([batch], objective, 1e-4, 0, 0)


def _plain_loop(case: Case, device: torch.device) -> Update:
    from pretrain.model.layers import compile_layers

    model = model_of(case, device)
    if device.type == "cuda":
        compile_layers(model)
    return _loop(case, model, device)


def _loop(case: Case, model: nn.Module, device: torch.device) -> Update:
    """PyTorch and nothing else: autocast to bf16 on a GPU, fp32 weights, fused AdamW."""
    from pretrain.engine import optimizers

    objective, numbers = case.objective(), OptimizerConfig()
    optimizer = optimizers.build(model, numbers)

    def update(batch: MicroBatch) -> None:
        optimizers.set_step(optimizer.param_groups, numbers, 1e-4, 0)
        with autocast(device):
            loss = objective.loss(model, batch.to(device))
        (loss.sum() / sum(batch.targets)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    return update


def _transformers(case: Case, device: torch.device) -> Update:
    import torch
    from transformers import AutoModelForMaskedLM, RobertaConfig

    architecture = case.architecture()
    config = RobertaConfig(
        vocab_size=case.vocab_size,
        hidden_size=architecture.hidden_size,
        num_hidden_layers=architecture.num_layers,
        num_attention_heads=architecture.num_heads,
        intermediate_size=architecture.intermediate_size,
        attention_probs_dropout_prob=0.1 if case.attention_dropout else 0.0,
        max_position_embeddings=case.length + 2,
        type_vocab_size=1,
    )
    make: Callable[..., nn.Module] = AutoModelForMaskedLM.from_config
    attention = case.contender.removeprefix("transformers ")
    model = make(config, attn_implementation=attention)
    model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def update(batch: MicroBatch) -> None:
        tensors = batch.to(device)
        labels, mask = labels_by_position(tensors), tensors.get("document_ids")
        with autocast(device):
            loss = model(input_ids=tensors["input_ids"], attention_mask=mask, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return update


def _the_original_s_way(case: Case, device: torch.device) -> Update:
    """Our model with the original's attention: the bias copied for each row, scores in memory."""
    import torch

    from pretrain.model import attention
    from pretrain.model.language_model import LanguageModel

    def attend(qkv: Tensor, context: attention.AttentionContext, dropout: float) -> Tensor:
        bias = context.bias
        assert bias is None or isinstance(bias, torch.Tensor)
        batch, length, _, heads, size = qkv.shape
        query, key, value = (
            part.transpose(1, 2).reshape(batch * heads, length, size) for part in qkv.unbind(2)
        )
        scores = torch.bmm(query * size**-0.5, key.transpose(1, 2))
        if bias is not None:
            scores += bias.expand(batch, heads, length, length).reshape(scores.shape)
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype)
        mixed = torch.bmm(torch.dropout(weights, dropout, train=True), value)
        return mixed.view(batch, heads, length, size).transpose(1, 2)

    attention.attend = attend  # this process does nothing else
    return _loop(case, LanguageModel(case.architecture()).to(device), device)


CONTENDERS: dict[str, Callable[[Case, torch.device], Update]] = {
    OURS: _through_deepspeed,
    PLAIN: _plain_loop,
    FLASH: _plain_loop,
    TRANSFORMERS: _transformers,
    EAGER: _transformers,
    ORIGINAL: _the_original_s_way,
}


def autocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """bf16 on a GPU, fp32 on a CPU."""
    import torch

    if device.type == "cpu":
        return contextlib.nullcontext()
    return torch.autocast(device.type, torch.bfloat16)
