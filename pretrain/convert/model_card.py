"""The model card of a model folder (README.md): use, training, provenance.

The description of the training comes from the provenance that `export` writes; other models have
less.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from data_prep.common.files import strict_json
from data_prep.common.markup import markdown_table
from data_prep.common.wording import count
from pretrain.convert import names as layout
from pretrain.convert.contents import ModelContents
from pretrain.records import ledger
from pretrain.records.wording import format_number


def model_card(name: str, contents: ModelContents) -> str:
    """Return the card as Markdown.

    Args:
        name: of the model.
        contents: of the model folder.
    """
    # A fine-tuned model has the provenance of the model that it was made from.
    trained = contents.provenance.get("pretrained") or contents.provenance
    # config.json has the architecture, the table the training.
    rest = {name: value for name, value in contents.provenance.items() if name != "training"}
    provenance = f"## Provenance\n\n```json\n{strict_json(rest, indent=1)}\n```\n"
    return "\n".join([_use(name, contents), *_training(trained.get("training")), provenance])


def _use(name: str, contents: ModelContents) -> str:
    config, classifier = contents.config, contents.classifier
    plain = layout.plain_type(config, classifier)
    call = layout.loading_call(config, classifier, "folder")
    task, what = {
        "SequenceClassification": ("text-classification", "A text classifier"),
        "CausalLM": ("text-generation", "A causal language model"),
    }.get(layout.task(config, classifier), ("fill-mask", "A masked language model"))
    trust = "" if plain else ", trust_remote_code=True"
    longer = (
        f"\nThe tokenizer truncates texts to {config.max_positions} tokens, the longest input in "
        "training. The model reads longer ones: set `tokenizer.model_max_length`.\n"
    )
    code = {
        None: "not in transformers; modeling_zeroclap.py is its code.",
        "roberta": "transformers' own RoBERTa; no other code is needed.",
        "albert": "transformers' own ALBERT; no other code is needed.",
    }[plain]
    python = f"""
```python
from transformers import {call.partition(".")[0]}, AutoTokenizer

folder = "."  # where this file is, or its name on the hub
tokenizer = AutoTokenizer.from_pretrained(folder{trust})
model = {call}
```
{longer if config.longest_input is None else ""}"""
    if not layout.in_transformers(config):
        code, python = "not in transformers; zeroclap's commands read it.", ""
    return f"""---
library_name: transformers
pipeline_tag: {task}
---

# {name}

{what}, exported by zeroclap. Its architecture is {code}
{python}"""


def _training(facts: Mapping[str, Any] | None) -> Iterator[str]:
    """Yield a table of `summary` of the run, if the model comes from one."""
    if not facts:
        return
    rows = {
        "corpus": "; ".join(map(_corpus, facts["corpora"])),
        "tokens read": f"{facts['tokens']:,}",
        "loss spikes that the training survived": (
            f"{facts['loss_spikes']}, with {count(facts['rollbacks'], 'rollback')}"
        ),
    }
    if origin := facts.get("init_from"):
        rows["initial weights"] = ledger.describe_origin(origin)
    if measured := facts.get("validation"):
        scores = {"": measured}
        if len(measured["subsets"]) > 1:
            scores |= {f" on {name}": score for name, score in measured["subsets"].items()}
        for where, score in scores.items():
            rows[f"validation perplexity{where}"] = format_number(score["perplexity"], ".3f")
        rows["validation perplexity"] += f" after {measured['step']:,} steps"
    yield from ("## Training", "", *markdown_table(("", ""), rows.items()))


def _corpus(facts: Mapping[str, Any]) -> str:
    text = f"{facts['name']} (digest {facts['digest'][:12]})"
    if "tokens" in facts:
        text += f": {facts['documents']:,} documents of {facts['tokens']:,} tokens"
    return text
