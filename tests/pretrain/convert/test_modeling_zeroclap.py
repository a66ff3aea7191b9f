"""Exported models in transformers: what the library and its users ask of any model."""

import dataclasses

import numpy as np
import pytest
import torch

from pretrain.convert.reading import read_folder
from pretrain.convert.writing import save_model
from tests.pretrain.convert.conftest import batch, close, loaded, task_of
from tests.pretrain.convert.contents import random_contents

PROGRAMS = ("zero-clap", "modern", "causal-alibi", "causal-t5-bias")
TASKS = {
    "": "last_hidden_state",
    "ForMaskedLM": "logits",
    "ForSequenceClassification": "logits",
    "ForTokenClassification": "logits",
    "ForQuestionAnswering": "start_logits",
}


def first_output(model, **inputs):
    with torch.no_grad():
        return model(**inputs)[0]


def fresh(transformers, folder, task, **settings):
    """The model of a folder for any task, with what the folder lacks drawn from one seed."""
    torch.manual_seed(0)
    auto = getattr(transformers, f"AutoModel{task}")
    return auto.from_pretrained(folder, trust_remote_code=True, **settings)


# Other variants differ from these in numbers alone, and have the same logits as with us.
KINDS = ("baseline", "sinusoidal", "alibi", "zero-clap", "albert", "shared-attention")
KINDS += ("modern", "causal-learned", "causal-rotary", "causal-t5-bias")


@pytest.fixture(params=KINDS)
def name(request):
    return request.param


@pytest.fixture
def model(name, transformers, exported):
    return loaded(transformers, exported(name).folder, task_of(name))


@pytest.fixture
def inputs():
    ids, mask = batch(400)
    return {"input_ids": ids, "attention_mask": mask}


def test_outputs_that_are_asked_for_are_those_that_were_used(name, model, exported, inputs):
    """Attention weights and hidden states, which are ours, and a tuple of the same."""
    expected = first_output(model, **inputs)
    model.config._attn_implementation = "eager"
    wanted = {**inputs, "output_attentions": True, "output_hidden_states": True}
    output, plain = model(**wanted), model(**wanted, return_dict=False)
    assert torch.equal(output.logits, plain[0])
    assert all(map(torch.equal, output.hidden_states, plain[1]))
    real = inputs["attention_mask"].bool()
    close(output.logits.detach()[real], expected[real])
    ids, encoder = inputs["input_ids"], exported(name).ours.model.encoder
    for ours, theirs in zip(encoder.hidden_states(ids, real), output.hidden_states, strict=True):
        close(theirs[real], ours[real])
    assert [weights.shape for weights in output.attentions] == [(2, 4, 24, 24)] * 2
    for weights in output.attentions:
        close(weights.sum(-1), torch.ones(2, 4, 24))
        assert not weights[1, :, :12, 12:].any()
    parts = [*output.attentions, *output.hidden_states]
    for part in parts:
        part.retain_grad()
    output.logits[0, :, :50].sum().backward()
    assert all(part.grad is not None and part.grad.any() for part in parts)


@pytest.mark.parametrize("name", [kind for kind in KINDS if kind != "albert"])
def test_gradients_do_not_change_with_checkpointing(model, inputs):
    """Dropout included. ALBERT of transformers cannot recompute activations."""
    model.train()

    def gradients():
        torch.manual_seed(1)
        model.zero_grad()
        model(**inputs, labels=inputs["input_ids"].clamp(max=50)).loss.backward()
        named = model.named_parameters()  # none of the pair head, which has no loss
        return {name: w.grad.clone() for name, w in named if w.grad is not None}

    expected = gradients()
    model.activation_checkpointing_enable()
    assert model.is_activation_checkpointing
    found = gradients()
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


def test_tokens_can_be_added(model, transformers, inputs, tmp_path):
    rows = model.config.vocab_size
    before = first_output(model, **inputs)
    model.resize_token_embeddings(rows + 3, mean_resizing=False)
    assert model.config.vocab_size == rows + 3
    close(first_output(model, **inputs)[..., :rows], before)
    new = {**inputs, "input_ids": inputs["input_ids"].clone()}
    new["input_ids"][:, 7] = rows + 2
    logits = first_output(model, **new)
    assert logits.shape[-1] == rows + 3
    assert logits.isfinite().all()
    assert (logits - first_output(model, **inputs))[0, 8, :50].abs().max() > 1e-5
    labels = torch.full_like(new["input_ids"], rows + 2)
    model(**new, labels=labels).loss.backward()
    model.save_pretrained(tmp_path)
    again = loaded(transformers, tmp_path, f"For{type(model).__name__.partition('For')[2]}")
    assert torch.equal(first_output(again, **new), logits)


@pytest.mark.parametrize("variant", ["alibi", "learned-clap"])
def test_tokens_can_be_removed(variant, transformers, exported, inputs):
    model = loaded(transformers, exported(variant).folder)
    ids = {**inputs, "input_ids": inputs["input_ids"].clamp(max=99)}
    before = first_output(model, **ids)
    model.resize_token_embeddings(100)
    close(first_output(model, **ids), before[..., :100])


def test_the_row_of_a_zero_mask_is_neither_trained_nor_removed(transformers, exported, inputs):
    model = loaded(transformers, exported("zero-clap").folder).train()
    mask = model.config.vocab_size - 1
    assert model.config.mask_token_ids == [mask]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    for _ in range(3):
        model(**inputs, labels=inputs["input_ids"].clamp(max=50)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not model.get_input_embeddings().weight[mask].any()
    logits = first_output(model.eval(), **inputs)
    assert not logits.softmax(-1)[..., mask].any()
    with pytest.raises(ValueError, match=f"{mask} rows: accepted: more than {mask}"):
        model.resize_token_embeddings(mask)
    model.config.vocab_size = mask
    with pytest.raises(ValueError, match=rf"mask_token_ids: \[{mask}\] .* below {mask}"):
        type(model)(model.config)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("name", ["alibi", "zero-clap", "shared-attention"])
def test_a_model_for_any_task_comes_back_as_it_was_saved(
    task, name, transformers, exported, inputs, tmp_path
):
    """It is on the encoder of the folder, in which layers share what they shared."""
    folder, ours = exported(name).folder, exported(name).contents
    model = fresh(transformers, folder, task)
    base = model.base_model
    again = fresh(transformers, folder, "")
    assert torch.equal(first_output(base, **inputs), first_output(again, **inputs))
    assert model.get_input_embeddings() is base.get_input_embeddings()
    first, second = base.layers
    assert (first.attention is second.attention) == ours.config.shares_attention
    assert first.expand is not second.expand
    model.save_pretrained(tmp_path)
    assert (tmp_path / "modeling_zeroclap.py").is_file()
    again = loaded(transformers, tmp_path, task)
    assert type(again).__name__ == type(model).__name__
    found, expected = again(**inputs), model(**inputs)
    assert TASKS[task] in found
    assert all(map(torch.equal, found.values(), expected.values()))
    if task in ("", "ForMaskedLM", "ForSequenceClassification"):
        transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path)
        back, predicts = read_folder(tmp_path), task == "ForMaskedLM"
        pairs = ours.config.pair_head and predicts
        assert back.config == dataclasses.replace(ours.config, pair_head=pairs)
        assert back.vocabulary.digest() == ours.vocabulary.digest()
        classifies = task == "ForSequenceClassification"
        assert (bool(back.classifier), back.has_head) == (classifies, predicts)


def test_a_fresh_model_is_drawn_and_a_fresh_classifier_leaves_the_encoder_alone(
    transformers, exported
):
    trust = {"trust_remote_code": True}
    export = exported("zero-clap")
    config = transformers.AutoConfig.from_pretrained(export.folder, **trust)
    assert (config.num_hidden_layers, config.num_attention_heads) == (2, 4)
    drawn = transformers.AutoModelForMaskedLM.from_config(config, **trust)
    assert drawn.head.beta.item() == 3.0
    assert 0.015 < drawn.encoder.layers[0].expand.weight.std() < 0.025
    assert not drawn.encoder.layers[0].expand.bias.any()
    config = transformers.AutoConfig.from_pretrained(exported("alibi").folder, **trust)
    assert not transformers.AutoModelForMaskedLM.from_config(config, **trust).head.bias.any()
    model, report = transformers.AutoModelForSequenceClassification.from_pretrained(
        export.folder, **trust, num_labels=5, output_loading_info=True
    )
    assert {name.split(".")[0] for name in report["missing_keys"]} == {"classifier"}
    assert model.classifier.projection.weight.shape == (5, 32)
    for name, weight in export.ours.model.encoder.state_dict().items():
        assert torch.equal(model.encoder.state_dict()[name][: len(weight)], weight), name


@pytest.mark.parametrize(
    "values", [{"latents": 4, "layer_norm": "pre", "causal": True}, {"head": "untied"}]
)
def test_what_transformers_cannot_compute_has_no_code_and_is_refused_there(
    values, tokenizer, transformers, exported, tmp_path
):
    note = save_model(tmp_path / "new", random_contents("baseline", tokenizer, **values))
    assert note == "transformers cannot load it: it has latents, or an untied head"
    assert not any((tmp_path / "new").glob("*.py"))
    assert "from_pretrained" not in (tmp_path / "new" / "README.md").read_text()
    folder = exported("causal-alibi").folder
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True)
    with pytest.raises(ValueError, match="must be 0$|must be one of roberta, clap, tied"):
        type(config)(**{**config.to_dict(), "position": "none", **values})


def test_losses_of_tokens_and_of_answers_are_means(transformers, exported, inputs):
    folder = exported("zero-clap").folder
    tokens = fresh(transformers, folder, "ForTokenClassification", num_labels=3)
    labels = torch.full((2, 24), -100)
    labels[0, 2:5] = torch.tensor([0, 1, 2])
    output = tokens(**inputs, labels=labels)
    wanted = torch.nn.functional.cross_entropy(output.logits[0, 2:5], labels[0, 2:5])
    close(output.loss, wanted)
    answers = fresh(transformers, folder, "ForQuestionAnswering")
    first, last = torch.tensor([3, 4]), torch.tensor([5, 6])
    output = answers(**inputs, start_positions=first, end_positions=last)
    cross_entropy = torch.nn.functional.cross_entropy
    losses = cross_entropy(output.start_logits, first), cross_entropy(output.end_logits, last)
    close(output.loss, sum(losses) / 2)


def test_accumulated_micro_batches_can_have_the_loss_of_the_whole_batch(
    transformers, exported, inputs
):
    """Trainer passes the number of targets of all of them to models that say so."""
    model = loaded(transformers, exported("zero-clap").folder)
    assert model.accepts_loss_kwargs
    ids = inputs["input_ids"]
    inputs = {**inputs, "labels": ids.masked_fill(ids > 200, -100).clamp(max=50)}
    targets = (inputs["labels"] != -100).sum()
    rows = ({name: x[row : row + 1] for name, x in inputs.items()} for row in range(2))
    parts = [model(**row, num_items_in_batch=targets).loss for row in rows]
    close(sum(parts), model(**inputs).loss)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_type_ids": torch.ones(2, 24, dtype=torch.long)}, "one type of token"),
        ({"attention_mask": torch.ones(2, 1, 24, 24)}, r"\[2, 1, 24, 24\] is not accepted"),
        ({"input_ids": torch.full((2, 24), 400)}, "out of range"),  # not taken for the mask
    ],
)
def test_inputs_that_would_be_ignored_are_refused(change, message, transformers, exported, inputs):
    model = loaded(transformers, exported("zero-clap").folder)
    zeros = torch.zeros(2, 24, dtype=torch.long)
    expected = first_output(model, **inputs)
    assert torch.equal(first_output(model, **inputs, token_type_ids=zeros), expected)
    with pytest.raises((ValueError, IndexError), match=message):
        model(**{**inputs, **change})


@pytest.mark.parametrize("name", ["flex_attention", "flash_attention_2"])
def test_other_ways_to_compute_attention_are_refused(name, transformers, exported):
    with pytest.raises(ValueError, match="does not support"):
        loaded(transformers, exported("zero-clap").folder, attn_implementation=name)


# --- programs ------------------------------------------------------------------------------------


def dynamic(vocab_size):
    """Inputs of two shapes, and which of their dimensions may change."""
    generator = torch.Generator().manual_seed(2)

    def make(rows, length, padding):
        ids = torch.randint(4, vocab_size - 1, (rows, length), generator=generator)
        ids[:, 3] = vocab_size - 1
        mask = torch.ones(rows, length, dtype=torch.long)
        mask[1, length - padding :] = 0
        return {"input_ids": ids, "attention_mask": mask}

    dimensions = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", max=64)}
    names = ("input_ids", "attention_mask")
    return make(2, 16, 6), make(70, 30, 9), {name: dimensions for name in names}


@pytest.mark.slow
def test_a_compiled_model_is_one_graph(transformers, exported, inputs):
    model = loaded(transformers, exported("zero-clap").folder)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    close(first_output(compiled, **inputs), first_output(model, **inputs))


@pytest.mark.filterwarnings("ignore")  # of the exporter itself
@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_exported_programs_and_onnx_take_batches_of_all_sizes(
    name, transformers, exported, tmp_path
):
    model = loaded(transformers, exported(name).folder, task_of(name))
    example, other, shapes = dynamic(model.config.vocab_size)
    expected = first_output(model, **other)
    settings = {"kwargs": example, "dynamic_shapes": shapes}
    program = torch.export.export(model, (), **settings, strict=False)
    close(first_output(program.module(), **other), expected)
    for package in ("onnx", "onnxscript"):
        pytest.importorskip(package)
    runtime, file = pytest.importorskip("onnxruntime"), tmp_path / "model.onnx"
    # The fused kernel of attention is exported only where a trained bias needs no gradient.
    with torch.no_grad():
        names = {"output_names": ["logits"], "dynamo": True, "verbose": False}
        torch.onnx.export(model, (), file, **settings, **names)
    given = {name: x.numpy() for name, x in other.items()}
    (logits,) = runtime.InferenceSession(file).run(["logits"], given)
    close(torch.from_numpy(logits), expected)


@pytest.mark.parametrize("variant", ["baseline", "zero-clap", "albert"])
def test_sentence_transformers_opens_a_folder_and_takes_the_mean(variant, transformers, exported):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    export = exported(variant)
    trust = {"trust_remote_code": True}
    theirs = sentence_transformers.SentenceTransformer(
        str(export.folder), device="cpu", model_kwargs=trust, config_kwargs=trust, **trust
    )
    texts = ["The value of it.", "a"]
    for text, vector in zip(texts, theirs.encode(texts), strict=True):
        (ids,) = export.contents.vocabulary.encode_batch([text])
        with torch.no_grad():
            features = export.ours.model.encoder(torch.tensor([[0, *ids.tolist(), 2]]))
        close(torch.from_numpy(vector), features[0].mean(0))


# --- Trainer -------------------------------------------------------------------------------------

TEXTS = [f"The value of {word} is what it is." for word in ("it", "this", "that", "all")] * 4


def data_of(transformers, task, words):
    """Rows, masked once as run_mlm does: drawn anew, masks differ after a resume; a collator."""
    if task == "ForMaskedLM":
        masked = transformers.DataCollatorForLanguageModeling(words, seed=3)
        rows = [masked([words(text)]).items() for text in TEXTS]
        rows = [{name: values[0].tolist() for name, values in row} for row in rows]
        return rows, transformers.DataCollatorForTokenClassification(words)
    rows = [{**words(text), "labels": index % 2} for index, text in enumerate(TEXTS)]
    return rows, transformers.DataCollatorWithPadding(words)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("task", ["ForMaskedLM", "ForSequenceClassification"])
@pytest.mark.slow
def test_trainer_trains_saves_resumes_and_what_it_saved_loads(
    task, transformers, exported, tmp_path
):
    pytest.importorskip("accelerate", reason="Trainer needs it")
    export = exported("zero-clap")
    words = transformers.AutoTokenizer.from_pretrained(export.folder, trust_remote_code=True)
    rows, collator = data_of(transformers, task, words)

    def trained(name, steps, resume=False):
        transformers.set_seed(1)
        model = fresh(transformers, export.folder, task)
        assert len(words) == len(model.get_input_embeddings().weight), "else run_mlm resizes it"
        arguments = transformers.TrainingArguments(
            **{"output_dir": str(tmp_path / name), "max_steps": steps, "save_steps": 2},
            **{"per_device_train_batch_size": 4, "dataloader_pin_memory": False, "use_cpu": True},
            **{"learning_rate": 1e-3, "lr_scheduler_type": "constant"},
            **{"report_to": [], "disable_tqdm": True},
        )
        settings = {"train_dataset": rows, "data_collator": collator, "processing_class": words}
        trainer = transformers.Trainer(model, arguments, **settings)
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    straight = trained("straight", 4)
    trained("stopped", 2)
    resumed = trained("stopped", 4, resume=True)
    assert resumed.state.global_step == 4
    before = fresh(transformers, export.folder, "").get_input_embeddings().weight
    assert not torch.equal(straight.model.get_input_embeddings().weight, before)
    resumed.save_model(str(tmp_path / "saved"))
    again = loaded(transformers, tmp_path / "saved", task)
    weights = resumed.model.state_dict()
    for other in (straight.model.state_dict(), again.state_dict()):
        assert other.keys() == weights.keys()
        assert all(torch.equal(other[name], weights[name]) for name in weights)
    assert np.isfinite(resumed.evaluate(rows)["eval_loss"])
    assert np.isfinite(resumed.predict(rows).predictions).all()
    back = read_folder(tmp_path / "saved")
    assert back.config == export.contents.config
    assert bool(back.classifier) == (task == "ForSequenceClassification")
