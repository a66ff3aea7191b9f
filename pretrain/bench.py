"""Training speed beside another library's, in the same run: what `python -m pretrain bench` does.

Every contender is a process of its own, so that its memory can be told apart. They take turns, an
update each, on the same batches; the ratio is the median over the turns, which a machine that is
busy with something else disturbs least.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

from pretrain.config import MaskingConfig, OptimizerConfig
from pretrain.objectives.masked import FIRST_WORD_ID, IGNORED, MaskedLM
from pretrain.prefetch import follow_parent

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from pretrain.model.config import ModelConfig

OURS = "zeroclap"
AGAINST = {"transformers": ("transformers sdpa", "transformers eager")}
"""Contenders of each library that can be named: RoBERTa with each of its attentions on a CPU."""
_WARM_UP = 2  # turns that are not counted

Batch = dict[str, "Tensor"]


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is trained, and on how much at a time; in fp32 on a CPU, under bf16 autocast on a GPU.

    Rows are of random ids, as many as are drawn evenly from half the sequence length to all of it.
    """

    size: str = "base"
    variant: str = "baseline"
    sequence_length: int = 512
    micro_batch_size: int = 4
    vocab_size: int = 50265
    """`<mask>` included."""

    def __post_init__(self) -> None:
        """Refuse shapes without room for text."""
        for name, least in (("sequence_length", 8), ("micro_batch_size", 1), ("vocab_size", 8)):
            value = getattr(self, name)
            if value < least:
                raise ValueError(f"{name} {value}: accepted: {least} or more")

    def architecture(self) -> ModelConfig:
        """The model that is meant.

        Raises:
            ValueError: no such size or variant.
        """
        from pretrain.model import presets

        overrides = {"max_positions": self.sequence_length}
        return presets.build(self.size, self.variant, self.vocab_size, overrides)


@dataclasses.dataclass(frozen=True)
class Result:
    """How one contender did."""

    name: str
    tokens_per_second: float
    """Real input tokens, at the median update."""
    peak_bytes: int
    """Most memory: of the GPU, or of the whole process on a CPU."""
    advantage: float
    """Time of its update over the time of ours: above 1, we are faster."""


def compare(setting: Setting, against: str, steps: int) -> list[Result]:
    """Train every contender for `steps` updates after a warm-up; ours comes first.

    Raises:
        ValueError: steps is below 1, the library is not installed, or the model is not known.
    """
    setting.architecture()
    if steps < 1:
        raise ValueError(f"steps {steps}: accepted: 1 or more")
    if find_spec(against) is None:
        raise ValueError(
            f"--against {against}: it is not installed; it comes with the test dependencies "
            "(pip install 'zeroclap[test]')"
        )
    names = (OURS, *AGAINST[against])
    with contextlib.ExitStack() as stack:
        pools = [
            stack.enter_context(
                ProcessPoolExecutor(1, get_context("spawn"), _begin, (name, setting))
            )
            for name in names
        ]
        turns = [
            [pool.submit(_timed_update, step).result() for pool in pools]
            for step in range(_WARM_UP + steps)
        ][_WARM_UP:]
        peaks = [pool.submit(_peak_bytes).result() for pool in pools]
    tokens = [_tokens(setting, _WARM_UP + step) for step in range(steps)]
    return [
        Result(
            name=name,
            tokens_per_second=statistics.median(
                count / turn[place] for count, turn in zip(tokens, turns, strict=True)
            ),
            peak_bytes=peaks[place],
            advantage=statistics.median(turn[place] / turn[0] for turn in turns),
        )
        for place, name in enumerate(names)
    ]


def table(setting: Setting, results: list[Result]) -> str:
    """What `compare` found, for people."""
    lines = [
        f"{setting.variant} {setting.size}, {setting.micro_batch_size} rows of at most "
        f"{setting.sequence_length} tokens, {setting.vocab_size:,} ids",
        f"{'':20} {'tokens/s':>10} {'peak memory':>12} {'ours is':>14}",
    ]
    for result in results:
        advantage = "" if result.name == OURS else f"{result.advantage:.2f} x as fast"
        lines.append(
            f"{result.name:20} {result.tokens_per_second:>10,.0f} "
            f"{result.peak_bytes / 1e9:>9.2f} GB {advantage:>14}"
        )
    return "\n".join(lines) + "\n"


def collate(setting: Setting, step: int) -> Batch:
    """The batch of a step, as MaskedLM gives it: the same for every contender."""
    import numpy as np
    import torch

    objective = _objective(setting)
    draw = np.random.default_rng(step)
    rows = [
        draw.integers(FIRST_WORD_ID, setting.vocab_size - 1, length)
        for length in _lengths(setting, step)
    ]
    keys = [(0, step, row) for row in range(len(rows))]
    arrays = objective.collate(rows, keys, setting.sequence_length)
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def standard(batch: Batch) -> Batch:
    """The same batch as transformers takes it: labels [B, T], IGNORED where there is none."""
    import torch

    labels = torch.full(batch["input_ids"].shape, IGNORED)
    used = batch["labels"] != IGNORED
    labels.view(-1)[batch["positions"][used]] = batch["labels"][used]
    return {
        "input_ids": batch["input_ids"],
        "attention_mask": batch["attention_mask"].long(),
        "labels": labels,
    }


def _lengths(setting: Setting, step: int) -> list[int]:
    import numpy as np

    draw = np.random.default_rng([step, 1])
    longest = setting.sequence_length
    return [int(n) for n in draw.integers(longest // 2, longest + 1, setting.micro_batch_size)]


def _tokens(setting: Setting, step: int) -> int:
    return sum(_lengths(setting, step))


def _objective(setting: Setting) -> MaskedLM:
    return MaskedLM(MaskingConfig(), setting.vocab_size - 1, setting.vocab_size - 1)


Update = Callable[[Batch], None]

_name: str
_setting: Setting
_device: torch.device
_update: Update
"""What this contender's process works with."""


def _begin(name: str, setting: Setting) -> None:
    global _name, _setting, _device, _update
    import torch

    follow_parent()
    _name, _setting = name, setting
    _device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    if name == OURS:
        _update = _our_update(setting, _device)
    else:
        _update = _their_update(setting, name.removeprefix("transformers "), _device)


def _our_update(setting: Setting, device: torch.device) -> Update:
    from pretrain import optimizers
    from pretrain.model.language_model import LanguageModel

    model = LanguageModel(setting.architecture(), vocabulary_multiple=128).to(device)
    objective, numbers = _objective(setting), OptimizerConfig()
    optimizer = optimizers.build(model, numbers)

    def update(batch: Batch) -> None:
        optimizers.set_step(optimizer.param_groups, numbers, numbers.learning_rate, 0)
        with _autocast(device):
            loss = objective.loss(model, batch)
        (loss / (batch["labels"] != IGNORED).sum()).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    return update


def _their_update(setting: Setting, attention: str, device: torch.device) -> Update:
    import torch
    from transformers import AutoModelForMaskedLM, RobertaConfig

    architecture, numbers = setting.architecture(), OptimizerConfig()
    config = RobertaConfig(
        vocab_size=setting.vocab_size,
        hidden_size=architecture.hidden_size,
        num_hidden_layers=architecture.num_layers,
        num_attention_heads=architecture.num_heads,
        intermediate_size=architecture.intermediate_size,
        max_position_embeddings=setting.sequence_length + 2,
        type_vocab_size=1,
    )
    make: Callable[..., torch.nn.Module] = AutoModelForMaskedLM.from_config
    model = make(config, attn_implementation=attention)
    model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=numbers.learning_rate, fused=True)

    def update(batch: Batch) -> None:
        with _autocast(device):
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return update


def _autocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    import torch

    if device.type == "cpu":
        return contextlib.nullcontext()
    return torch.autocast(device.type, torch.bfloat16)


def _timed_update(step: int) -> float:
    """Seconds of one update."""
    arrays = collate(_setting, step)
    if _name != OURS:
        arrays = standard(arrays)
    batch = {name: tensor.to(_device) for name, tensor in arrays.items()}
    _wait()
    started = time.perf_counter()
    _update(batch)
    _wait()
    return time.perf_counter() - started


def _wait() -> None:
    import torch

    if _device.type == "cuda":
        torch.cuda.synchronize()


def _peak_bytes() -> int:
    import torch

    if _device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    # Not getrusage: it begins with the memory of the process that started this one.
    status = Path("/proc/self/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])
