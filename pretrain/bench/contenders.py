"""The training loops that `pretrain bench` measures: ours and others, on the same batches."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from data_prep.tokenizer import Tokenizer
from pretrain.config.run import BatchConfig, OptimizerConfig
from pretrain.engine import engine, optimizers
from pretrain.loop import MicroBatch
from pretrain.model import attention, presets
from pretrain.model.config import ModelConfig
from pretrain.model.language_model import LanguageModel
from pretrain.model.layers import compile_layers
from pretrain.objectives.base import Block, PretrainingObjective, Vocabulary
from pretrain.objectives.causal import CausalLMConfig
from pretrain.objectives.masked import MaskedLMConfig
from pretrain.objectives.tokens import FIRST_WORD_ID, labels_by_position

OURS, PLAIN = "zeroclap", "zeroclap, plain loop"
FLASH = "zeroclap, plain loop, FLASH"
FORWARD = "zeroclap, forward pass"
TRANSFORMERS, EAGER = "transformers sdpa", "transformers eager"
FAIRSEQ = "EIFY/fairseq's attention"
LAYOUTS = ("full", "unmasked", "padded", "packed")
_VOCABULARY_MULTIPLE = 128

Update = Callable[[MicroBatch], object]


@dataclasses.dataclass(frozen=True)
class Case:
    """One measurement: a contender, a model and the shape of a micro-batch.

    Attention dropout is off, because FlexAttention has none.
    """

    contender: str
    """A key of CONTENDERS."""
    size: str
    variant: str
    length: int
    """Tokens per row."""
    rows: int
    """Rows per micro-batch; an update reads one micro-batch."""
    layout: str
    """One of LAYOUTS: full rows with a mask; full rows without one; one document of random length
    per row, padded; several documents per row."""
    vocab_size: int = 50265
    parts: bool = False
    """Whether to measure the parts of an update as well."""

    def __post_init__(self) -> None:
        """Check that a row has room for text.

        Raises:
            ValueError: it has not.
        """
        if self.length < 8:
            raise ValueError(f"length {self.length}: accepted: 8 or more")

    def architecture(self) -> ModelConfig:
        """Return the model's config.

        Raises:
            ValueError: unknown size or variant.
        """
        # Token vectors of the hidden size, as the others have them.
        sizes = {"max_positions": self.length, "embedding_size": 0}
        overrides = {**sizes, "attention_dropout": 0.0}
        return presets.build(self.size, self.variant, self.vocab_size, overrides)

    def objective(self) -> PretrainingObjective:
        """Return the training objective: masked language modelling; of causal models, causal."""
        vocabulary = Vocabulary(self.vocab_size, self.vocab_size - 1, Path())
        settings = CausalLMConfig() if self.architecture().causal else MaskedLMConfig()
        return settings.build(vocabulary, compiled=torch.cuda.is_available())

    def name(self) -> str:
        """Return a one-line description."""
        shape = f"{self.rows} x {self.length}, {self.layout}"
        return f"{self.contender}: {self.size} {self.variant}, {shape}"


def collate(case: Case, step: int) -> MicroBatch:
    """Return the micro-batch of a step, made of random ids."""
    draw = np.random.default_rng([step, case.length])
    longest = case.length
    lengths = [longest] * case.rows
    if case.layout == "padded":
        lengths = draw.integers(longest // 2, longest + 1, case.rows).tolist()
    rows = [draw.integers(FIRST_WORD_ID, case.vocab_size - 1, length) for length in lengths]
    if case.architecture().causal:
        for ids in rows:
            ids[0] = Tokenizer.bos_id
    blocks = [Block(ids) for ids in rows]
    if case.layout == "packed":  # four documents of random lengths per row
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
    """Build our model with new weights; it uses FlexAttention on a GPU."""
    backend = "dense"
    if device.type == "cuda":
        backend = "flex-flash" if case.contender == FLASH else "flex"
    return LanguageModel(case.architecture(), _VOCABULARY_MULTIPLE, backend).to(device)


def _through_deepspeed(case: Case, device: torch.device) -> Update:
    on_gpu = device.type == "cuda"
    name = "zero1_bf16" if on_gpu else "zero1_fp32"
    process = engine.start()
    batch = BatchConfig(global_batch_size=case.rows, micro_batch_size=case.rows)
    settings = engine.deepspeed_json(name, batch, 0.0, process.world_size)
    model = model_of(case, device)
    built = engine.Engine(model, OptimizerConfig(), settings, process, compiled=on_gpu)
    objective = case.objective()

    def update(batch: MicroBatch) -> object:
        counts = batch.tokens, *batch.targets  # as in the loop, which knows them beforehand
        return built.step([batch], objective, 1e-4, 0, 0, counts=counts)

    return update


def _compiled_model(case: Case, device: torch.device) -> LanguageModel:
    model = model_of(case, device)
    if device.type == "cuda":
        compile_layers(model)
    return model


def _plain_loop(case: Case, device: torch.device) -> Update:
    return _train_ours(case, _compiled_model(case, device), device)


def _forward_pass(case: Case, device: torch.device) -> Update:
    """Compute the loss as evaluation does: no dropout, no gradients."""
    model, objective = _compiled_model(case, device).eval(), case.objective()

    @torch.no_grad()
    def evaluate(batch: MicroBatch) -> None:
        with autocast(device):
            objective.loss(model, batch.to(device))

    return evaluate


def _train_ours(case: Case, model: LanguageModel, device: torch.device) -> Update:
    objective = case.objective()

    def loss_of(batch: MicroBatch) -> Tensor:
        return objective.loss(model, batch.to(device)).sum() / sum(batch.targets)

    return _train(optimizers.build(model, OptimizerConfig()), loss_of, device)


def _train(
    optimizer: torch.optim.Optimizer, loss_of: Callable[[MicroBatch], Tensor], device: torch.device
) -> Update:
    """Train with plain PyTorch: fp32 weights, autocast to bf16 on a GPU, fused AdamW."""
    for group in optimizer.param_groups:
        group["lr"] = 1e-4

    def update(batch: MicroBatch) -> None:
        with autocast(device):
            loss = loss_of(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    return update


def _transformers(case: Case, device: torch.device) -> Update:
    from transformers import AutoModelForMaskedLM, RobertaConfig

    architecture = case.architecture()
    config = RobertaConfig(
        vocab_size=case.vocab_size,
        hidden_size=architecture.hidden_size,
        num_hidden_layers=architecture.num_layers,
        num_attention_heads=architecture.num_heads,
        intermediate_size=architecture.intermediate_size,
        attention_probs_dropout_prob=0.0,
        max_position_embeddings=case.length + 2,
        type_vocab_size=1,
    )
    make: Callable[..., nn.Module] = AutoModelForMaskedLM.from_config
    model = make(config, attn_implementation=case.contender.removeprefix("transformers "))
    model.to(device).train()

    def loss_of(batch: MicroBatch) -> Tensor:
        tensors = batch.to(device)
        labels, mask = labels_by_position(tensors), tensors.get("document_ids")
        loss: Tensor = model(
            input_ids=tensors["input_ids"], attention_mask=mask, labels=labels
        ).loss
        return loss

    return _train(torch.optim.AdamW(model.parameters(), fused=True), loss_of, device)


def _fairseq_attention(case: Case, device: torch.device) -> Update:
    """Our model with the attention of EIFY/fairseq: bias copied per row, scores materialized."""

    def attend(qkv: Tensor, context: attention.AttentionContext, dropout: float) -> Tensor:
        bias = context.bias
        assert bias is None or isinstance(bias, Tensor)
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

    attention.attend = attend  # this process runs no other contender
    return _train_ours(case, LanguageModel(case.architecture()).to(device), device)


CONTENDERS: dict[str, Callable[[Case, torch.device], Update]] = {
    OURS: _through_deepspeed,
    PLAIN: _plain_loop,
    FLASH: _plain_loop,
    FORWARD: _forward_pass,
    TRANSFORMERS: _transformers,
    EAGER: _transformers,
    FAIRSEQ: _fairseq_attention,
}


def autocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Return an autocast context: bf16 on a GPU, fp32 on a CPU."""
    if device.type == "cpu":
        return contextlib.nullcontext()
    return torch.autocast(device.type, torch.bfloat16)
