"""`make demo`: everything end to end, in minutes, on text that comes with Python.

Runs the project's own commands one after the other, as a user would type them, and prints a table
of what they measured.
"""

import argparse
import glob
import itertools
import json
import random
import shlex
import shutil
import sysconfig
import time
from pathlib import Path

from data_prep.common import children
from data_prep.common.files import json_lines, write_atomically

MARK = ".made-by-zeroclap-demo"
"""Marks a folder that the next demo may delete."""
TASK = "word-order"
MODULES = ("asyncio", "email", "importlib", "logging", "multiprocessing", "unittest")
_FEWEST_WORDS, _MOST_WORDS = 5, 20
"""Of a docstring; longer ones are cut."""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `demo`."""
    output = "a folder for the demo alone; its previous content is deleted (default: demo-output)"
    command.add_argument("--output", type=Path, default=Path("demo-output"), help=output)


def stages(output: Path, world_size: int) -> dict[str, str]:
    """Return the demo's commands by their purpose, in order.

    A command is the arguments of `zeroclap`, quoted as for a shell.
    """
    out = shlex.quote(str(output))
    texts = shlex.quote(f"{glob.escape(str(output))}/text/*.jsonl.zst")
    return {
        "real text, from the Python installation": f"sample --output {out}/text",
        "a vocabulary for it": f"train-tokenizer --input {texts} --vocab-size 4096 "
        f"--output {out}/vocabulary",
        "text to indexed binaries, with several processes": f"prepare --input {texts} "
        f"--output {out}/corpus --tokenizer {out}/vocabulary --valid-fraction 0.07 --workers 2",
        "check every checksum and index": f"verify {out}/corpus",
        "pretraining through the deepspeed launcher, supervised; one block of text is damaged": (
            f"supervise demo folder={out}/run data.corpus={out}/corpus "
            f"supervision.processes_per_node={world_size}"
        ),
        "a model folder": f"export {out}/run --output {out}/model",
        "validation perplexity, at the training length and beyond it": (
            f"evaluate {out}/model --data {out}/corpus --lengths 128,256 "
            f"--json {out}/evaluation.json"
        ),
        "what the model predicts for a masked word": (
            f"fill-mask {out}/model 'Return the <mask> of the given object.' --top-k 3"
        ),
        "fine-tuning to tell a docstring from one whose words were shuffled: two seeds, from "
        "pretrained and from random weights": (
            f"finetune {out}/model --train {out}/{TASK}.jsonl --text text "
            f"--label words --dev-share 0.2 --name {TASK} --seeds 1,2 --weights both "
            f"--output {out}/scores epochs=1 learning_rate=5e-4 warmup_fraction=0.2 pooling=mean "
            "dropout=0 attention_dropout=0"
        ),
    }


def word_order() -> bytes:
    """Return the task as lines of JSON: docstrings of Python, every second one shuffled.

    Pretraining has read most of them, in order. No code is executed, and the same Python version
    gives the same lines.
    """
    from data_prep.sample import docstrings

    library = Path(sysconfig.get_path("stdlib"))
    found: set[tuple[str, ...]] = set()
    for file in (file for module in MODULES for file in (library / module).rglob("*.py")):
        texts = itertools.chain.from_iterable(docstrings(file))
        found |= {tuple(text.split()[:_MOST_WORDS]) for text in texts}
    examples = [list(words) for words in sorted(found) if len(words) >= _FEWEST_WORDS]
    generator = random.Random(0)
    generator.shuffle(examples)
    for words in examples[::2]:
        generator.shuffle(words)
    labels = itertools.cycle(("shuffled", "in order"))
    rows = zip(examples, labels, strict=False)
    return json_lines({"text": " ".join(words), "words": label} for words, label in rows)


def demo(options: argparse.Namespace) -> int:
    """Run everything end to end on text from Python itself.

    example: zeroclap demo --output demo-output
    """
    from pretrain.processes.gpus import visible_gpus

    output: Path = options.output
    if output.exists() and any(output.iterdir()) and not (output / MARK).exists():
        raise ValueError(f"{output}: has files that no demo made; choose a new folder")
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    (output / MARK).touch()
    write_atomically(output / f"{TASK}.jsonl", word_order())
    began = time.monotonic()
    plan = stages(output, min(2, len(visible_gpus()) or 2))
    for number, (title, words) in enumerate(plan.items(), start=1):
        print(f"\n[{number}/{len(plan)}] {title}\n$ zeroclap {words}", flush=True)
        started = time.monotonic()
        if code := children.run(["finetune.zeroclap", *shlex.split(words)]):
            print(f"stage {number} failed with exit code {code}")
            return code
        print(f"({time.monotonic() - started:.0f} s)", flush=True)
    print(f"\n{table(output, time.monotonic() - began)}")
    return 0


def table(output: Path, seconds: float) -> str:
    """Format what the demo measured, and where to find more."""
    from data_prep.manifest import load_manifest
    from finetune.report import CONSTANT, collect, summary
    from finetune.runs import WEIGHTS
    from pretrain.records import status
    from pretrain.records.report import costs

    corpus = load_manifest(output / "corpus")
    seen = status.view(output / "run")
    rows = {
        f"validation perplexity, {e['length']} tokens": f"{e['total']['perplexity']:.1f}"
        for e in json.loads((output / "evaluation.json").read_text())
    }
    rows["  of the unigram distribution"] = f"{corpus.unigram_perplexity:.1f}"
    scores = summary(collect(output / "scores")).set_index(["model", "epoch", "score"])["median"]
    titles = {**{name: f"{name} weights" for name in WEIGHTS}, CONSTANT: CONSTANT}
    for name, title in titles.items():
        rows[f"word order, accuracy, {title}"] = f"{scores[name, 'last', 'accuracy']:.3f}"
    rows["loss spikes survived"] = str(len(seen.state.rollbacks))
    rows["pretraining speed"] = f"{costs(seen)['tokens/s, median']} tokens/s"
    rows["whole demo"] = f"{seconds:.0f} s"
    width = max(map(len, rows))
    lines = [f"{name:<{width}}  {value:>14}" for name, value in rows.items()]
    files = [
        f"loss plot            {output / 'run' / 'loss.png'}",
        f"TensorBoard          tensorboard --logdir {output / 'run' / 'tensorboard'}",
        f"fine-tuning scores   {output / 'scores' / 'report.md'}",
    ]
    return "\n".join([*lines, "", *files])
