"""Trainer of transformers on exported models: it trains, saves, resumes, and loads again."""

import numpy as np
import pytest
import torch

from pretrain.convert.reading import read_folder
from tests.pretrain.convert.conftest import loaded

TEXTS = [f"The value of {word} is what it is." for word in ("it", "this", "that", "all")] * 4


def masked_rows(transformers, tokenizer):
    """As run_mlm makes them, but masked once: drawn anew, masks differ after a resume."""
    collator = transformers.DataCollatorForLanguageModeling(tokenizer, seed=3)
    batches = [collator([tokenizer(text)]) for text in TEXTS]
    return [{name: values[0].tolist() for name, values in batch.items()} for batch in batches]


def labelled_rows(tokenizer):
    return [{**tokenizer(text), "labels": index % 2} for index, text in enumerate(TEXTS)]


@pytest.fixture
def trained(transformers, exported, tmp_path):
    """`trained(variant, task, name, steps, resume)`: a trainer that has trained so many steps."""
    pytest.importorskip("accelerate", reason="Trainer needs it")

    def train(variant, task, name, steps, resume=False):
        folder = exported(variant).folder
        transformers.set_seed(1)
        auto = getattr(transformers, f"AutoModel{task}")
        model = auto.from_pretrained(folder, trust_remote_code=True)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
        if task == "ForMaskedLM":
            # Otherwise run_mlm resizes the model.
            assert len(tokenizer) == len(model.get_input_embeddings().weight)
            rows = masked_rows(transformers, tokenizer)
            collator = transformers.DataCollatorForTokenClassification(tokenizer)
        else:
            rows = labelled_rows(tokenizer)
            collator = transformers.DataCollatorWithPadding(tokenizer)
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path / name),
            max_steps=steps,
            per_device_train_batch_size=4,
            save_steps=2,
            learning_rate=1e-3,
            lr_scheduler_type="constant",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            dataloader_pin_memory=False,
        )
        trainer = transformers.Trainer(
            model,
            arguments,
            train_dataset=rows,
            data_collator=collator,
            processing_class=tokenizer,
        )
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    return train


def same_weights(one, other):
    mine, theirs = one.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[k], theirs[k]) for k in mine)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("task", ["ForMaskedLM", "ForSequenceClassification"])
@pytest.mark.slow
def test_trainer_trains_saves_resumes_and_what_it_saved_loads(
    task, trained, transformers, exported, tmp_path
):
    variant = "zero-clap"
    straight = trained(variant, task, "straight", 4)
    trained(variant, task, "stopped", 2)
    resumed = trained(variant, task, "stopped", 4, resume=True)
    assert resumed.state.global_step == 4
    assert same_weights(resumed.model, straight.model)
    before = transformers.AutoModel.from_pretrained(
        exported(variant).folder, trust_remote_code=True
    )
    assert not torch.equal(
        straight.model.get_input_embeddings().weight, before.get_input_embeddings().weight
    )
    resumed.save_model(str(tmp_path / "saved"))
    again = loaded(transformers, tmp_path / "saved", task)
    assert same_weights(again, resumed.model)
    assert np.isfinite(resumed.evaluate(resumed.train_dataset)["eval_loss"])
    predictions = resumed.predict(resumed.train_dataset).predictions
    assert np.isfinite(predictions).all()
    back = read_folder(tmp_path / "saved")
    assert back.config.to_dict().keys() == exported(variant).contents.config.to_dict().keys()
    assert bool(back.classifier) == (task == "ForSequenceClassification")
