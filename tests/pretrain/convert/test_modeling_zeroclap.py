"""Exported models in transformers: what the library and its users ask of any model."""

import pytest
import torch

from pretrain.convert.reading import read_folder
from tests.pretrain.convert.conftest import batch, loaded, task_of

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
KINDS = ("baseline", "sinusoidal", "alibi", "zero-clap", "albert", "albert sharing attention")
KINDS += ("modern", "causal-learned", "causal-rotary", "causal-t5-bias")


@pytest.fixture(params=KINDS)
def model(request, transformers, exported):
    variant, *shared = request.param.split()
    overrides = {"sharing": "attention", "embedding_size": 16} if shared else {}
    return loaded(transformers, exported(variant, None, **overrides).folder, task_of(variant))


# transformers' counts positions from the padding, and cannot recompute activations.
but_transformers_albert = pytest.mark.parametrize(
    "model", [kind for kind in KINDS if kind != "albert"], indirect=True
)


@pytest.fixture
def inputs(exported):
    ids, mask, _ = batch(exported("zero-clap").contents.vocabulary.vocab_size)
    return {"input_ids": ids, "attention_mask": mask}


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=0)


def test_attention_weights_are_those_that_the_layers_used(model, inputs):
    expected = first_output(model, **inputs)
    model.config._attn_implementation = "eager"
    output = model(**inputs, output_attentions=True, output_hidden_states=True)
    real = inputs["attention_mask"].bool()
    close(output.logits.detach()[real], expected[real])
    assert [weights.shape for weights in output.attentions] == [(2, 4, 24, 24)] * 2
    for weights in output.attentions:
        close(weights.sum(-1), torch.ones(2, 4, 24))
        assert not weights[1, :, :12, 12:].any()
    parts = [*output.attentions, *output.hidden_states]
    for part in parts:
        part.retain_grad()
    output.logits[0, :, :50].sum().backward()
    assert all(part.grad is not None and part.grad.any() for part in parts)


def test_a_tuple_holds_what_the_named_output_holds(model, inputs):
    wanted = {**inputs, "output_hidden_states": True}
    with torch.no_grad():
        named, plain = model(**wanted), model(**wanted, return_dict=False)
    assert torch.equal(named.logits, plain[0])
    assert all(map(torch.equal, named.hidden_states, plain[-1]))


@but_transformers_albert
def test_the_side_of_the_padding_changes_nothing(model, inputs):
    right = first_output(model, **inputs)
    turned = {name: x.roll(12, dims=1) for name, x in inputs.items()}
    left = first_output(model, **{name: x[1:] for name, x in turned.items()})
    close(left[0, 12:], right[1, :12])


@but_transformers_albert
def test_gradients_do_not_change_with_checkpointing(model, inputs):
    """Dropout included. The library's older name for it warns."""
    model.train()

    def gradients():
        torch.manual_seed(1)
        model.zero_grad()
        model(**inputs, labels=inputs["input_ids"].clamp(max=50)).loss.backward()
        return {name: weight.grad.clone() for name, weight in model.named_parameters()}

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
@pytest.mark.parametrize("variant", ["alibi", "zero-clap"])
def test_a_model_for_any_task_comes_back_as_it_was_saved(
    task, variant, transformers, exported, inputs, tmp_path
):
    model = fresh(transformers, exported(variant).folder, task)
    expected = first_output(model, **inputs)
    assert torch.equal(first_output(model, **inputs), expected)
    model.save_pretrained(tmp_path)
    assert (tmp_path / "modeling_zeroclap.py").is_file()
    again = loaded(transformers, tmp_path, task)
    assert type(again).__name__ == type(model).__name__
    assert torch.equal(again(**inputs)[TASKS[task]], expected)
    if task in ("ForMaskedLM", "ForSequenceClassification"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(exported(variant).folder)
        tokenizer.save_pretrained(tmp_path)
        back, ours = read_folder(tmp_path), exported(variant).contents
        assert (back.config, back.vocabulary.digest()) == (ours.config, ours.vocabulary.digest())
        assert bool(back.classifier) == (task == "ForSequenceClassification")


@pytest.mark.parametrize("variant", ["baseline", "zero-clap"])
def test_every_head_is_on_the_same_encoder(variant, transformers, exported, inputs):
    folder = exported(variant).folder
    encoder = fresh(transformers, folder, "")
    features = first_output(encoder, **inputs)
    for task in TASKS:
        model = fresh(transformers, folder, task)
        base = model.base_model
        assert (base is model) == (task == "")
        assert torch.equal(first_output(base, **inputs), features)
        assert model.get_input_embeddings() is base.get_input_embeddings()


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
    losses = [
        torch.nn.functional.cross_entropy(logits, place)
        for logits, place in ((output.start_logits, first), (output.end_logits, last))
    ]
    close(output.loss, sum(losses) / 2)


def test_accumulated_micro_batches_can_have_the_loss_of_the_whole_batch(
    transformers, exported, inputs
):
    """Trainer passes the number of targets of all of them to models that say so."""
    model = loaded(transformers, exported("zero-clap").folder)
    assert model.accepts_loss_kwargs
    labels = inputs["input_ids"].masked_fill(inputs["input_ids"] > 200, -100).clamp(max=50)
    whole = model(**inputs, labels=labels).loss
    targets = (labels != -100).sum()
    parts = [
        model(
            input_ids=inputs["input_ids"][row],
            attention_mask=inputs["attention_mask"][row],
            labels=labels[row],
            num_items_in_batch=targets,
        ).loss
        for row in (slice(0, 1), slice(1, 2))
    ]
    close(sum(parts), whole)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_type_ids": torch.ones(2, 24, dtype=torch.long)}, "one type of token"),
        ({"attention_mask": torch.ones(2, 1, 24, 24)}, r"\[2, 1, 24, 24\] is not accepted"),
    ],
)
def test_inputs_that_would_be_ignored_are_refused(change, message, transformers, exported, inputs):
    model = loaded(transformers, exported("zero-clap").folder)
    expected = first_output(model, **inputs)
    zeros = torch.zeros(2, 24, dtype=torch.long)
    assert torch.equal(first_output(model, **inputs, token_type_ids=zeros), expected)
    with pytest.raises(ValueError, match=message):
        model(**{**inputs, **change})


def test_ids_beyond_the_table_are_not_taken_for_the_mask(transformers, exported):
    model = loaded(transformers, exported("zero-clap").folder)
    with pytest.raises(IndexError):
        model(input_ids=torch.tensor([[0, model.config.vocab_size]]))


@pytest.mark.parametrize("name", ["flex_attention", "flash_attention_2"])
def test_other_ways_to_compute_attention_are_refused(name, transformers, exported):
    with pytest.raises((ValueError, ImportError)):
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
@pytest.mark.parametrize("variant", PROGRAMS)
def test_an_exported_program_takes_batches_of_all_sizes(variant, transformers, exported):
    model = loaded(transformers, exported(variant).folder, task_of(variant))
    example, other, shapes = dynamic(model.config.vocab_size)
    program = torch.export.export(model, (), example, dynamic_shapes=shapes, strict=False)
    with torch.no_grad():
        logits = program.module()(**other).logits
    close(logits, first_output(model, **other))


@pytest.mark.slow
def test_a_compiled_model_is_one_graph(transformers, exported, inputs):
    model = loaded(transformers, exported("zero-clap").folder)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    close(first_output(compiled, **inputs), first_output(model, **inputs))


@pytest.mark.filterwarnings("ignore")  # of the exporter itself
@pytest.mark.slow
@pytest.mark.parametrize("variant", PROGRAMS)
def test_onnx_gives_the_same_logits(variant, transformers, exported, tmp_path):
    for name in ("onnx", "onnxscript"):
        pytest.importorskip(name)
    runtime = pytest.importorskip("onnxruntime")
    model = loaded(transformers, exported(variant).folder, task_of(variant))
    example, other, shapes = dynamic(model.config.vocab_size)
    file = tmp_path / "model.onnx"
    # The fused kernel of attention is exported only where a trained bias needs no gradient.
    with torch.no_grad():
        torch.onnx.export(
            model,
            (),
            file,
            kwargs=example,
            dynamic_shapes=shapes,
            output_names=["logits"],
            dynamo=True,
            verbose=False,
        )
    (logits,) = runtime.InferenceSession(file).run(
        ["logits"], {name: x.numpy() for name, x in other.items()}
    )
    close(torch.from_numpy(logits), first_output(model, **other))


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
            features = export.model.encoder(torch.tensor([[0, *ids.tolist(), 2]]))
        close(torch.from_numpy(vector), features[0].mean(0))
