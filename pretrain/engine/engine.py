"""The DeepSpeed engine: start-up, one update, evaluation, save and load.

Order of use: `deepspeed_json` (the configuration), `start` (the process group), `Engine`. Only this
module, `consolidated` and `workarounds` import deepspeed.
"""

import functools
import hashlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from pretrain.config.deepspeed import check_known_keys, read_settings, stage_of
from pretrain.config.sections import BatchConfig, OptimizerConfig
from pretrain.engine import optimizers, reshard, workarounds
from pretrain.engine.by_parameter import ByParameter
from pretrain.engine.consolidated import read_states
from pretrain.engine.distributed import Process, adopt_launcher, all_sum, check_port_is_free
from pretrain.loop.protocols import MicroBatch, StepInput, StepResult, TermLoss, weighted_loss


def deepspeed_json(
    name: str, batch: BatchConfig, clipping: float, world_size: int
) -> dict[str, Any]:
    """Read a DeepSpeed configuration of a run, and check its sections.

    Raises:
        ValueError: as `read_settings`, or a key or value of a section is not accepted.
    """
    workarounds.select_cpu_without_gpu()
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero import config, offload_config

    settings = read_settings(name, batch, clipping, world_size)
    sections = settings | settings.get("zero_optimization", {})
    for section, record in {
        "offload_optimizer": offload_config.DeepSpeedZeroOffloadOptimizerConfig,
        "offload_param": offload_config.DeepSpeedZeroOffloadParamConfig,
        "zero_optimization": config.DeepSpeedZeroConfig,
        "fp16": DeepSpeedFP16Config,
        "bf16": DeepSpeedBF16Config,
    }.items():
        aliases = {field.alias for field in record.model_fields.values() if field.alias}
        known, values = record.model_fields.keys() | aliases, sections.get(section) or {}
        check_known_keys(f"{name}: {section}", values, known)
        try:
            record(**values)
        except ValidationError as error:
            first = error.errors()[0]
            key, value = ".".join(map(str, (section, *first["loc"]))), first["input"]
            reason = f"{value!r} is not accepted: {first['msg']}"
            raise ValueError(f"{name}: {key}: {reason}") from None
    return settings


def start() -> Process:
    """Join the process group that the launcher's variables describe; without a launcher, of one.

    Raises:
        PortInUse: another process listens on MASTER_PORT.
        ValueError: the variables contradict each other, there are more ranks than GPUs, or torch
            cannot use the GPUs.
    """
    adopt_launcher(os.environ)
    check_port_is_free(os.environ)
    process = Process.from_environment()
    process.prepare_device()
    process.prepare_cpu()
    on_gpu = process.device.type == "cuda"
    workarounds.select_cpu_without_gpu()
    import deepspeed

    if not on_gpu:
        workarounds.disable_shared_memory_op()
    workarounds.limit_collective_timeouts()
    workarounds.silence_renamed_collectives()
    deepspeed.init_distributed(dist_backend="nccl" if on_gpu else "gloo", verbose=False)
    return process


def _seed_dropout(seed: int, step: int, index: int, device: torch.device) -> None:
    """Seed the generators of the CPU and of `device` for the micro-batch `index` of a step.

    torch.manual_seed gives the same numbers, and formats the stack for every kind of device that
    is not in use: milliseconds for each micro-batch.
    """
    digest = hashlib.blake2b(f"{seed} {step} {index}".encode(), digest_size=8).digest()
    own_seed = int.from_bytes(digest, "little") >> 1
    torch.default_generator.manual_seed(own_seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(own_seed)


class Engine:
    """A model and its optimizer, sharded by DeepSpeed ZeRO."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: OptimizerConfig,
        settings: Mapping[str, Any],
        process: Process,
    ) -> None:
        """Initialise DeepSpeed with `model`.

        Args:
            model: with its initial weights, equal on all ranks.
            optimizer: settings of the optimizer; `step` takes the learning rate.
            settings: the result of `deepspeed_json`.
            process: the result of `start`.
        """
        import deepspeed

        self.rank, self.device = process.rank, process.device
        self.world_size = process.world_size
        self._optimizer = optimizer
        wrapped = optimizers.build(model, optimizer)
        stage = stage_of(settings)
        # With fp32 accumulation at stage 1, DeepSpeed would take another optimizer, in whose
        # checkpoints its own tools find no weights.
        config = {**settings, "data_types": {}} if stage == 1 else dict(settings)
        # DeepSpeed keeps views of the weights (utils/tensor_fragment.py). If autograd recorded
        # them, they would bind each gradient to the default stream, and no CUDA graph could be
        # captured.
        with torch.no_grad():
            self._deepspeed, *_ = deepspeed.initialize(None, model, wrapped, config=config)
        if stage in (1, 2):
            workarounds.judge_overflow_by_norm(self._deepspeed.optimizer)
        workarounds.accumulate_by_group(self._deepspeed, settings)
        if stage > 0 and isinstance(wrapped, ByParameter):
            pieces = {
                tensor: reshard.pieces(stage, shapes, len(tensor), self.rank, self.world_size)
                for tensor, shapes in workarounds.partitions(self._deepspeed.optimizer)
            }
            wrapped.set_pieces(pieces, self.device)
        workarounds.clear_padding(list(self._deepspeed.module.parameters()))

    @property
    def module(self) -> nn.Module:
        """The model as wrapped by DeepSpeed, which can be called at every ZeRO stage."""
        return self._deepspeed

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Equally many numbers of every rank, in rank order, on every rank; in fp64."""
        if self.world_size == 1:
            return [list(values)]
        own = torch.tensor(values, dtype=torch.float64, device=self.device)
        found = own.new_empty(self.world_size * len(values))
        torch.distributed.all_gather_into_tensor(found, own)
        return found.view(self.world_size, -1).tolist()

    def backward(self, given: StepInput) -> Tensor:
        """Compute the gradient of `Objective`'s loss over the global batch.

        DeepSpeed averages over ranks, which is undone here, and would divide by a number of
        accumulation steps, which it is told not to: the result does not depend on how the batch was
        split, nor on the size of the batch before.

        Returns:
            The sum of each term over this rank's targets, in nats: [terms], in fp64, which the host
            has not waited for.

        Raises:
            ValueError: the global batch has no targets.
        """
        micro_batches, objective, (_, *targets) = given.micro_batches, given.objective, given.counts
        if not any(targets):
            raise ValueError(
                f"step {given.step}: the global batch has no targets; make batch.global_batch_size "
                "larger, or let the objective predict more tokens"
            )
        weights = objective.terms.values()
        scale = self.world_size * micro_batches[0].gradient_scale  # alike in all of them
        factors = torch.tensor(
            [scale * w / n if n else 0.0 for w, n in zip(weights, targets, strict=True)],
            device=self.device,
        )
        sums = torch.zeros(len(targets), dtype=torch.float64, device=self.device)
        self._deepspeed.train()
        for number, batch in enumerate(micro_batches, start=1):
            self._deepspeed.set_gradient_accumulation_boundary(number == len(micro_batches))
            _seed_dropout(batch.seed, given.step, batch.index, self.device)
            losses = objective.loss(self._deepspeed, batch.to(self.device))
            if not any(batch.targets):
                losses = losses * 0.0  # computed for the collectives of the other ranks alone
            self._deepspeed.backward((losses * factors).sum(), scale_wrt_gas=False)
            sums += losses.detach()
        return sums

    def update(self, given: StepInput, losses: Tensor, learning_rate: float) -> StepResult:
        """Update the weights, and sum the losses of all ranks; the host waits for both.

        Under ZeRO an update whose gradient is not finite is skipped. The step still counts for the
        batches and the learning rate, but not for AdamW's bias corrections.

        Args:
            given: as in `backward`.
            losses: what `backward` returned; overwritten.
            learning_rate: of this update.
        """
        optimizer, skipped = self._deepspeed.optimizer, self._deepspeed.skipped_steps
        at_smallest_scale = workarounds.is_scale_exhausted(optimizer)
        loss_scale = float(getattr(optimizer, "cur_scale", 1.0))
        applied = given.step - skipped
        optimizers.set_step(optimizer.param_groups, self._optimizer, learning_rate, applied)
        whole_norm = self._stage_zero_norm()
        with workarounds.loss_scale_grows_after(optimizer):
            self._deepspeed.step()
        is_skipped = self._deepspeed.skipped_steps > skipped
        totals = all_sum(losses, self.device)
        if whole_norm is None:
            whole_norm = self._deepspeed.get_global_grad_norm()
        norm = float(whole_norm)
        weights, (tokens, *targets) = given.objective.terms, given.counts
        terms = {
            name: TermLoss(total / count if count else None, count)
            for name, total, count in zip(weights, totals, targets, strict=True)
        }
        return StepResult(
            loss=weighted_loss(weights, terms),
            targets=sum(targets),
            tokens=tokens,
            # A norm that is not finite is -1 where DeepSpeed was told not to check for it.
            gradient_norm=norm if math.isfinite(norm) and norm >= 0 else None,
            terms=terms if len(terms) > 1 else {},
            loss_scale=loss_scale,
            skipped=is_skipped,
            scale_exhausted=is_skipped and at_smallest_scale,
        )

    def _stage_zero_norm(self) -> Tensor | None:
        """Norm of the whole gradients at stage 0, where DeepSpeed reports none; else None."""
        if self._deepspeed.zero_optimization_stage() > 0:
            return None
        gradients = [p.grad for p in self._deepspeed.module.parameters() if p.grad is not None]
        return torch.nn.utils.get_total_norm(gradients)

    def evaluate(
        self,
        micro_batches: Sequence[MicroBatch],
        sums: Callable[[nn.Module, dict[str, Tensor]], Tensor],
    ) -> list[float]:
        """Sums over the batches of all ranks, without dropout.

        Args:
            micro_batches: this rank's, at least one. The sums of those without targets do not
                count; the model is called on them, since under ZeRO 3 the ranks must call it
                equally often.
            sums: function of the model and a batch's tensors; returns a tensor of any shape.

        Returns:
            The sum, flattened.
        """
        self._deepspeed.eval()
        with torch.no_grad():
            parts = [sums(self._deepspeed, batch.to(self.device)) for batch in micro_batches]
        counted = [
            part if any(batch.targets) else torch.zeros_like(part)
            for part, batch in zip(parts, micro_batches, strict=True)
        ]
        return all_sum(torch.stack(counted).sum(dim=0).flatten(), self.device)

    def save(self, folder: Path) -> None:
        """Save this rank's part of the weights and optimizer state.

        Every rank calls this after the same step. A rank that cannot write takes part to the end,
        because the others wait for it in DeepSpeed's collectives. The file `latest` is not written,
        because DeepSpeed writes it before all ranks have finished.

        Raises:
            OSError: this rank could not write; with torch's message, which may not name the cause.
        """
        errors: list[Exception] = []
        writer = self._deepspeed.checkpoint_engine
        with (
            workarounds.collect_write_errors(writer, "save", errors),
            workarounds.collect_write_errors(self._deepspeed, "_copy_recovery_script", errors),
        ):
            self._deepspeed.save_checkpoint(str(folder.parent), tag=folder.name, save_latest=False)
        if errors:
            raise OSError(f"{folder}: cannot be written: {errors[0]}") from errors[0]

    def weights(self) -> dict[str, Tensor]:
        """The fp32 weights on the CPU, on rank 0, by name; every rank calls it."""
        from deepspeed.utils import safe_get_full_fp32_param

        found = {}
        for name, parameter in self._deepspeed.module.named_parameters():
            whole = safe_get_full_fp32_param(parameter)  # None at stage 0
            if self.rank == 0:
                found[name] = (parameter if whole is None else whole).detach().to("cpu", copy=True)
        return found

    def load(self, folder: Path) -> None:
        """Read a checkpoint that `save` wrote with this or another number of ranks.

        Nothing in its files is executed.

        Raises:
            ValueError: the folder holds no checkpoint, or one of other parameters; or a file asks
                for code to be run. A run refuses another ZeRO stage before (`check_same_state`).
        """
        parts = list(folder.glob("*_optim_states.pt"))
        with workarounds.keep_scaler(self._deepspeed.optimizer), workarounds.load_without_code():
            if parts and len(parts) != self.world_size:
                # Names differ only in the rank; rank 10 comes after rank 9.
                self._reshard(folder, sorted(parts, key=lambda path: (len(path.name), path.name)))
                return
            found, _ = self._deepspeed.load_checkpoint(str(folder.parent), tag=folder.name)
        if found is None:
            raise ValueError(f"{folder}: holds no DeepSpeed checkpoint")

    def _reshard(self, folder: Path, parts: Sequence[Path]) -> None:
        @functools.cache
        def saved(rank: int) -> dict[str, Any]:
            state: dict[str, Any] = read_states(parts[rank])["optimizer_state_dict"]
            return state

        optimizer, stage = self._deepspeed.optimizer, self._deepspeed.zero_optimization_stage()
        partitions = workarounds.partitions(optimizer)
        state = reshard.state_for_rank(saved, len(parts), partitions, self.rank, self.world_size)
        optimizer.load_state_dict([state] * self.world_size, load_from_fp32_weights=True)
        # Update the rounded weights of the forward pass, and those that every rank holds in full.
        if stage == 3:
            optimizer.checkpoint_event_epilogue()
        else:
            optimizer.update_lp_params()
        (states, *_) = folder.glob("*_model_states.pt")
        self._deepspeed.skipped_steps = read_states(states)["skipped_steps"]
