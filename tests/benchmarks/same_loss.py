"""A baseline of ours and one of transformers on the same text: validation losses and tokens/s.

    python -m tests.benchmarks.same_loss medium --output checked data.corpus=work/corpus

Ours is the recipe with the variant baseline, supervised and exported. Theirs is RobertaForMaskedLM
with fresh weights in a plain loop: the same rows in the same order, hidden by their collator,
torch's AdamW, the same learning rates; compiled, in bf16 by autocast, on a GPU. Both are measured
by our code on the same hidden tokens. The losses should differ by less than 0.02, or than seeds do.

Three trials (2026-11-28, two CPU cores, recipe small with dropout 0.1, a vocabulary of 4,096, 150
updates of 2,048 tokens, seeds 1 to 3): ours minus theirs -0.027, -0.015 and +0.001, of 6.94 nats;
1.2, 1.4 and 2.0 times their tokens/s, beside other work. Not yet run longer, nor on a GPU.
"""

import argparse
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pretrain.config.load import load
from pretrain.config.run import RunConfig
from pretrain.convert.model_folder import load_model
from pretrain.data.sources import open_source
from pretrain.engine.distributed import Process, choose_device
from pretrain.inference.evaluate import evaluate_blocks, validation_objective
from pretrain.objectives.base import Vocabulary
from pretrain.objectives.tokens import IGNORED
from pretrain.records.metrics import METRICS, read_metrics
from tests.pretrain.builders import batches_of


def ours(recipe: str, words: list[str], run: Path, model: Path) -> float:
    """Train and export; return the tokens/s."""
    for arguments in (["supervise", recipe, *words], ["export", str(run), "--output", str(model)]):
        subprocess.run([sys.executable, "-m", "finetune.zeroclap", *arguments], check=True)
    lines = read_metrics(run / METRICS)
    return statistics.median(line["tokens"] / line["seconds"] for line in lines)


def rows(config: RunConfig, mask_id: int) -> Iterator[list[tuple[dict[str, Tensor], int]]]:
    """The micro-batches of each step as text with nothing hidden, and their tokens."""
    source = open_source(config.segments.sources[0], "train")
    vocabulary = Vocabulary(mask_id + 1, mask_id + 1, source.corpus.folder)
    objective = config.objective.build(vocabulary)
    batches = batches_of(source, objective, config.batch, seed=config.training.seed)
    for step in range(config.training.steps):
        found = []
        for batch in batches.micro_batches(step, 0, 1):
            tensors = batch.to(torch.device("cpu"))
            used = tensors["labels"] != IGNORED
            text = tensors["input_ids"].clone()
            text.view(-1)[tensors["target_positions"][used]] = tensors["labels"][used]
            documents = tensors.get("document_ids", torch.ones_like(text))
            found.append(({"text": text, "documents": documents}, batch.tokens))
        yield found


def positions(documents: Tensor) -> Tensor:
    """Positions as RoBERTa counts them, from 2 on in each document: [B, T]."""
    places = torch.arange(documents.shape[1]).expand_as(documents)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return places - torch.where(begins, places, 0).cummax(dim=1).values + 2


def theirs(config: RunConfig, model: Path, output: Path) -> float:
    """Train their model with the config of ours, and write its folder; return the tokens/s."""
    from transformers import (
        AutoConfig,
        AutoTokenizer,
        DataCollatorForLanguageModeling,
        RobertaForMaskedLM,
    )

    torch.manual_seed(config.training.seed)
    device, tokenizer = choose_device(), AutoTokenizer.from_pretrained(model)
    collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15)
    architecture = AutoConfig.from_pretrained(model, attn_implementation="sdpa")
    network: Any = RobertaForMaskedLM(architecture).to(device).train()
    trained = torch.compile(network) if device.type == "cuda" else network
    settings = config.optimizer
    optimizer = torch.optim.AdamW(
        network.parameters(),
        betas=(settings.beta1, settings.beta2),
        eps=settings.epsilon,
        weight_decay=settings.weight_decay,
        fused=True,
    )
    speeds = []
    for step, batch in enumerate(rows(config, tokenizer.mask_token_id)):
        began = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = config.segments.learning_rate(step)
        for tensors, _ in batch:
            hidden = collator([{"input_ids": row} for row in tensors["text"]])
            documents = tensors["documents"]
            seen = (documents[:, None, :, None] == documents[:, None, None, :]).to(device)
            with torch.autocast("cuda", torch.bfloat16, enabled=device.type == "cuda"):
                loss = trained(
                    input_ids=hidden["input_ids"].to(device),
                    labels=hidden["labels"].to(device),
                    attention_mask=seen,
                    position_ids=positions(documents).to(device),
                ).loss
            (loss / len(batch)).backward()
        if settings.gradient_clipping:
            torch.nn.utils.clip_grad_norm_(network.parameters(), settings.gradient_clipping)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()  # waits for the device
        speeds.append(sum(tokens for _, tokens in batch) / (time.perf_counter() - began))
    shutil.copytree(model, output)
    network.save_pretrained(output)
    return statistics.median(speeds)


def validation_loss(config: RunConfig, model: Path) -> float:
    loaded = load_model(model)
    source = open_source(config.segments.sources[0], "valid")
    network = loaded.model.to(choose_device()).eval()
    digest = loaded.tokenizer.digest()
    objective = validation_objective(network, digest, source.corpus, config.objective)
    limit = config.training.evaluation_blocks
    return evaluate_blocks(network, objective, source, limit).total.loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe", help="which trains a masked model")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value")
    options = parser.parse_intermixed_args()
    Process.from_environment({}).prepare_cpu()
    run = options.output / "run"
    words = [*options.overrides, "model.variant=baseline", f"folder={run}"]
    words += ["supervision.processes_per_node=1"]
    config = load(options.recipe, words)
    models = [options.output / name for name in ("ours", "theirs")]
    speeds = [ours(options.recipe, words, run, models[0]), theirs(config, *models)]
    losses = [validation_loss(config, model) for model in models]
    for name, loss, speed in zip(("ours", "transformers"), losses, speeds, strict=True):
        print(f"{name}: validation loss {loss:.4f}, {speed:,.0f} tokens/s")
    print(f"losses differ by {losses[0] - losses[1]:+.4f}; speed {speeds[0] / speeds[1]:.2f} times")


if __name__ == "__main__":
    main()
