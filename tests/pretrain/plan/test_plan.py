"""Plans agree with what real engines and models use."""

import dataclasses
import gc
import json
import math
import re

import numpy as np
import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from data_prep.corpus import Corpus
from finetune.zeroclap import main
from pretrain.checks import devices, needs
from pretrain.config import load as recipes
from pretrain.config.deepspeed import DS_CONFIGS
from pretrain.config.sections import BatchConfig, OptimizerConfig
from pretrain.data.sources import BestFitBlocks
from pretrain.engine import engine
from pretrain.loop.protocols import MicroBatch
from pretrain.model import presets
from pretrain.model.attention import dense_bias
from pretrain.model.language_model import LanguageModel
from pretrain.model.layers import checkpoint_activations
from pretrain.model.masks import visible_keys
from pretrain.model.positions import position_module
from pretrain.objectives.base import Block
from pretrain.objectives.masked import MaskedLM, MaskedLMConfig
from pretrain.plan import plan
from tests.pretrain.builders import one_update
from tests.pretrain.memory import LiveBytes

OBJECTIVE = MaskedLM(MaskedLMConfig(), 999, 999)


def of(name, *overrides, gpus=8, kind="h100"):
    return plan.plan(recipes.load(name, overrides), gpus, kind)


@pytest.mark.parametrize("variant", ["baseline", "zero-clap"])
def test_rows_without_an_id_are_all_that_a_vocabulary_s_multiple_adds(variant):
    """A bias of the logits has none of them."""
    config = presets.build("base", variant, 50265, {})
    added = needs.parameters(config, 128) - needs.parameters(config)
    assert added == (50304 - config.vocab_size) * config.hidden_size


@pytest.mark.parametrize("variant", presets.VARIANTS)
def test_the_lower_bound_is_close_to_what_is_counted_and_never_above_it(variant):
    for name in ("zero1_bf16", "zero3_bf16_offload"):
        words = [f"model.variant={variant}", f"training.deepspeed={name}"]
        config = recipes.load("pile-base", words)
        planned = plan.plan(config, 8, "h100")
        model = presets.build("base", variant, 50265, {})
        count, device, host = needs.least_states(config, model, 8)
        assert 0.98 * planned.parameters < count <= planned.parameters
        memory = planned.memory[planned.stage]
        if name == "zero1_bf16":
            states = memory.weights + memory.gradients + memory.optimizer
            assert (0.98 * states < device <= states, host) == (True, 0)
        else:  # gradients pass through the GPU one by one
            assert 0.98 * memory.weights < device <= memory.weights
            assert 0.98 * memory.optimizer < host <= memory.optimizer


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_the_memory_of_another_stage_is_that_of_its_file(precision):
    """Which is the file that the guides name for it."""
    files = [of("pile-base", f"training.deepspeed=zero{n}_{precision}") for n in (1, 2, 3)]
    for planned in files[1:]:
        assert files[0].memory[planned.stage] == planned.memory[planned.stage]


@pytest.mark.parametrize("size", ["tiny", "large"])
def test_the_lower_bound_holds_for_the_smallest_and_the_largest(size):
    config = recipes.load("pile-base")
    models = [presets.build(size, variant, 50265, {}) for variant in presets.VARIANTS]
    for model in {dataclasses.replace(model, num_layers=2) for model in models}:
        count, _, _ = needs.least_states(config, model, 8)
        assert 0.95 * needs.parameters(model) < count <= needs.parameters(model), model


@pytest.mark.parametrize("latents", [0, 16])
@pytest.mark.parametrize(("head", "size"), [("tied", 64), ("untied", 16), ("roberta", 64)])
def test_flops_count_every_matrix_product_of_the_layers_and_the_head(latents, head, size):
    """Of RoBERTa's head the published count knows the last matrix alone."""
    length, vocabulary, hidden, share = 48, 100, 64, 0.25
    values = {"hidden_size": hidden, "num_heads": 4, "intermediate_size": 96, "num_layers": 3}
    values |= {"embedding_size": size % hidden, "latents": latents, "head": head}
    config = presets.build("tiny", "char-vanilla", vocabulary, values)
    with torch.device("meta"):
        layers = LanguageModel(config).encoder.layers
    sizes = [latents or length] * 3
    per_row = 0
    for number, layer in enumerate(layers):
        tokens, ends = sizes[number], number in (0, 2)
        if latents and number == 2:
            tokens = length
        keys = (length if number == 0 else latents) if latents else length
        for name, part in layer.named_modules():
            if isinstance(part, torch.nn.Linear):
                weights = part.weight.numel()
                if latents and ends and name.endswith("query_key_value"):
                    per_row += weights // 3 * (tokens + 2 * keys)
                else:
                    per_row += weights * tokens
        per_row += 2 * tokens * keys * hidden
    if size < hidden:
        per_row += length * size * hidden
    head_size = hidden if head == "untied" else size
    per_row += share * length * head_size * vocabulary
    found = needs.flops_per_token(config, length, share)
    assert found == pytest.approx(6 * per_row / length)


def test_flops_of_a_gate_and_of_windows():
    """Layers 1 and 2 of 4 see 33 tokens; where a text is shorter, all of it."""
    values = {"num_layers": 4, "local_window": 32, "intermediate_size": 96}
    config = presets.build("tiny", "modern", 100, values)
    for length, keys in ((512, 33), (16, 16)):
        matrices = 4 * (4 * 32 * 32 + 3 * 32 * 96)
        attention = 2 * 32 * (2 * length + 2 * keys)
        expected = 6 * (matrices + attention + 0.3 * 32 * 100)
        assert needs.flops_per_token(config, length, 0.3) == pytest.approx(expected)


@pytest.mark.parametrize("variant", ["zero-clap", "causal-alibi", "modern"])
@pytest.mark.parametrize(
    "ids",
    [
        np.array([[1, 1, 1, 2, 2, 2, 2, 2], [1, 1, 1, 1, 1, 1, 0, 0], [3, 4, 4, 4, 4, 4, 4, 4]]),
        np.arange(8) < np.array([[8], [5], [1]]),
    ],
    ids=["packed", "a document a row"],
)
def test_the_pairs_that_attention_computes_are_those_of_its_masks(variant, ids):
    """Layer 1 and 2 of 4 see two tokens on either side in the modern variant."""
    layers = {"num_layers": 4, "attention_dropout": 0.0}
    layers |= {"local_window": 4, "global_every": 3} if variant == "modern" else {}
    model = presets.build("tiny", variant, 1000, layers)
    assert needs.computed_pairs(model, "dense", ids) == 4 * 8 * ids.size
    row, place, seen = torch.arange(3)[:, None, None], torch.arange(8), 0
    for window in model.windows:
        rule = visible_keys(torch.from_numpy(ids), model.causal, window)
        seen += rule(row, row, place[:, None], place).expand(3, 8, 8).sum().item()
    assert needs.computed_pairs(model, "flex", ids) == seen


def test_tokens_and_flops_of_the_pile_recipes():
    """771 and 2462 MFLOP per token."""
    for planned, each in ((of("pile-base"), 771), (of("pile-large"), 2462)):
        assert planned.tokens == 133_082 * 512 * 2048
        assert round(planned.flops / planned.tokens / 1e6) == each


def live_bytes():
    """Bytes of all storages of live tensors."""
    gc.collect()
    storages = [
        thing.untyped_storage() for thing in gc.get_objects() if isinstance(thing, torch.Tensor)
    ]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.mark.parametrize(
    ("name", "world_size"),
    [("zero0_fp32", 2), ("zero1_bf16", 2), ("zero2_bf16", 2), ("zero3_fp32", 2), ("zero1_bf16", 1)],
)
def test_an_engine_uses_the_planned_memory_and_disk(name, world_size, run_ranks, tmp_path):
    config = presets.build("small", "alibi", 1000, {})
    batch = BatchConfig(global_batch_size=4, micro_batch_size=2)

    def work():
        group = engine.start()
        settings = engine.deepspeed_json(name, batch, 0.0, group.world_size)
        if name.startswith("zero3"):  # otherwise so small a model is not partitioned at all
            settings["zero_optimization"]["stage3_param_persistence_threshold"] = 0
            settings["zero_optimization"]["reduce_bucket_size"] = 200_000
        before = live_bytes()
        built = engine.Engine(LanguageModel(config), OptimizerConfig(), settings, group)
        parts = [(0, 0, 0), (0, 0, 1)]
        arrays = OBJECTIVE.collate([Block(np.arange(4, 30))] * 2, parts, 30)
        mine = [MicroBatch(index, arrays, 52, (8,)) for index in range(2 // group.world_size)]
        one_update(built, mine, OBJECTIVE, 1e-3, 0)
        held = live_bytes() - before
        built.save(tmp_path / "saved")
        return held, settings

    held, settings = run_ranks(world_size, work)[0]
    count, stage = needs.parameters(config), int(name[4])
    weights, gradients, optimizer, bucket = needs.states(count, stage, world_size, settings)
    assert (stage > 1) == (bucket > 0)
    kept = gradients + bucket if stage in (1, 3) else 0  # other stages free them after the update
    assert held == pytest.approx(weights + optimizer + kept, rel=0.03)
    written = sum(path.stat().st_size for path in (tmp_path / "saved").rglob("*"))
    planned = needs.checkpoint_bytes(count, needs.weight_bytes(settings), stage)
    assert written == pytest.approx(planned, rel=0.01)


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("variant", ["baseline", "zero-clap", "modern"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_forward_pass_saves_what_is_planned(variant, checkpointing, packed):
    """Without attention dropout, so that the attention kernels save no scores."""
    hidden_dropout = 0.1 if variant == "baseline" else 0.0
    overrides = {"attention_dropout": 0.0, "dropout": hidden_dropout}
    config = presets.build("small", variant, 1000, overrides)
    model, rows, length = LanguageModel(config).train(), 3, 128
    if checkpointing:
        checkpoint_activations(model)
    ids = np.random.default_rng(0).integers(4, 999, (rows, length))
    parts = [*ids[:-1], ids[-1][:-1]]  # where nothing is hidden, a CPU makes a smaller bias
    blocks = [Block(part, np.arange(len(part)) // 50 + 1 if packed else None) for part in parts]
    arrays = OBJECTIVE.collate(blocks, [(0, 0, row) for row in range(rows)], length)
    batch = {name: torch.from_numpy(array) for name, array in arrays.items()}
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = OBJECTIVE.loss(model, batch)
    measured = sum(storage.nbytes() for storage in kept.values())
    del loss
    with LiveBytes() as memory:
        OBJECTIVE.loss(model, batch)
    bias = needs.bias_bytes(config, rows, length, 4, packed)
    planned = needs.activations(config, rows, length, 0.15, 4, checkpointing, bias)
    assert measured <= memory.peak <= 1.15 * planned
    if checkpointing:  # the recomputed layer comes in the backward pass
        measured += bias[0]  # part of AttentionContext, which is kept but not as a saved tensor
        first, more = (
            needs.activations(
                dataclasses.replace(config, num_layers=n), rows, length, 0.15, 4, False, bias
            )
            for n in (1, 2)
        )
        planned -= more - first
    # The plan does not count the target positions and small tensors of the loss.
    assert measured == pytest.approx(planned, rel=0.15)


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("variant", ["baseline", "zero-clap"])
def test_the_dense_bias_takes_the_planned_memory_while_it_is_built_and_after(
    variant, dtype, rows, packed
):
    """To the byte, but for single numbers and a few numbers per token."""
    config, length = presets.build("tiny", variant, 1000, {}), 80
    mask = torch.ones(rows, length, dtype=torch.int64 if packed else torch.bool)
    mask[:, -1] = 0  # where nothing is hidden, a CPU makes less
    method, x = position_module(config.method.score_bias, config), torch.empty(1, dtype=dtype)
    x = x.expand(rows, length, config.hidden_size)
    with LiveBytes() as memory:
        scores = None if method is None else method(x.device)
        bias = dense_bias(scores, mask, config.num_heads, x)
        held = memory.live
    planned = needs.bias_bytes(config, rows, length, dtype.itemsize, packed)
    assert bias.untyped_storage().nbytes() == planned[0]
    assert (held, memory.peak) == pytest.approx(planned, abs=16 * length)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("position", ["learned", "rotary", "alibi"])
def test_the_biases_of_latents_take_the_planned_memory(position, dtype):
    """And at most the planned peak; what the embeddings and rotations take is small beside it."""
    overrides = {"latents": 96, "position": position, "max_positions": 384}
    overrides["attention_dropout"] = 0.0  # on a CPU its bias is in parts
    config = presets.build("tiny", "char-perceiver", 1000, overrides)
    encoder, rows, length = LanguageModel(config).to(dtype).encoder, 4, 384
    ids = torch.ones(rows, length, dtype=torch.int64)
    mask = torch.arange(length) < torch.tensor([length, 200, 300, 90])[:, None]
    with LiveBytes() as memory, torch.no_grad():
        _, context = encoder.embed(ids, mask)
        held = memory.live
    biases = [context.bias, context.down, context.up]
    sizes = [0 if bias is None else bias.untyped_storage().nbytes() for bias in biases]
    kept, peak = needs.bias_bytes(config, rows, length, dtype.itemsize, False)
    assert sum(sizes) == kept
    assert memory.peak - held <= peak - kept + 32 * rows * length * config.hidden_size


def test_the_plan_counts_the_bias_of_the_back_end():
    """[16, 12, 2048, 2048] in bf16, and none with FlexAttention."""
    dense, flex, learned = (
        of("pile-base", f"model.variant={variant}", "model.overrides.attention_dropout=0.0", *words)
        for variant, *words in [
            ("alibi", "training.attention_backend=dense"),
            ("alibi", "training.attention_backend=flex"),
            ("sinusoidal", "training.attention_backend=dense"),
        ]
    )
    saved = [planned.memory[1].activations for planned in (dense, flex, learned)]
    assert saved[0] - saved[1] == 16 * 12 * 2048**2 * 2
    assert saved[2] - saved[1] == 16 * 2048 * 2


def test_logits_that_are_compiled_with_their_loss_count_once():
    """In bf16 2 bytes of each, not 12; at ZeRO stage 3 nothing is compiled."""
    eager, compiled = (of("pile-base", f"training.compile={it}").memory for it in ("false", "true"))
    saved = [eager[stage].activations - compiled[stage].activations for stage in (1, 2, 3)]
    assert saved == [10 * 16 * math.ceil(0.15 * 2048) * 50265] * 2 + [0]


@pytest.mark.slow  # compiles C++
def test_the_gradient_of_compiled_logits_takes_their_place(run_ranks):
    model = LanguageModel(presets.build("tiny", "zero-clap", 1000, {}), vocabulary_multiple=64)
    embedding, labels = model.encoder.embeddings.tokens.weight, torch.arange(77)

    def work():
        from torch._inductor.utils import run_and_get_code  # imports the compiler

        predict = torch.compile(model._predict, dynamic=False)
        given = embedding[:77], embedding, labels
        with torch._inductor.config.patch(force_disable_caches=True):
            _, code = run_and_get_code(lambda: predict(*given).backward())
        return "".join(code).count("= empty_strided_cpu((77, 1024)")

    assert run_ranks(1, work) == [1]


def test_a_corpus_that_is_not_here_is_named(capsys):
    assert main(["plan", "small", "data.corpus=corpsu"]) == 0
    assert capsys.readouterr().err == "note: corpsu: no such folder on this machine\n"


def test_the_command_prints_a_table_and_writes_what_it_prints(tmp_path, capsys):
    path = tmp_path / "plan.json"
    arguments = ["pile-large", "model.variant=zero-clap", "--gpus", "16", "--kind", "h100"]
    assert main(["plan", *arguments, "--json", str(path)]) == 0
    printed, written = capsys.readouterr().out, json.loads(path.read_text())
    assert written["parameters"] == 353_779_713
    assert "353,779,713" in printed
    assert " 50,265 ids, assumed: no corpus is on this machine" in printed  # `<mask>` is one
    assert written["reading"] is None
    assert "epochs       unknown: data.corpus is not a folder" in printed
    speed = written["tokens"] / written["seconds"]
    assert f" on 16 h100, {speed:,.0f} tokens/s (padding" in printed
    assert list(written["memory"]) == ["1", "2", "3"]
    for stage, memory in written["memory"].items():
        assert re.search(rf"ZeRO {stage} .* {memory['activations'] / 1e9:.2f} GB ", printed)


@pytest.mark.parametrize(
    ("recipe", "gpus"),
    [("pile-base", 8), ("small batch.micro_batch_size=1 batch.global_batch_size=6", 6)],
)
def test_without_a_number_there_are_as_many_gpus_as_share_the_batch(recipe, gpus, tmp_path, capsys):
    assert main(["plan", *recipe.split(), "--json", str(tmp_path / "plan.json")]) == 0
    assert json.loads((tmp_path / "plan.json").read_text())["world_size"] == gpus
    assert f"per rank of {gpus}, " in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--training.steps=150"], ["--training.steps", "150"]])
def test_a_setting_with_dashes_is_answered_with_how_to_write_it(words, capsys):
    with pytest.raises(SystemExit):
        main(["plan", "small", *words])
    assert "training.steps=VALUE" in capsys.readouterr().err


def test_more_gpus_than_a_batch_is_shared_by_are_refused(capsys):
    assert main(["plan", "pile-base", "--gpus", "5000"]) == 2
    assert "x 5,000 ranks" in capsys.readouterr().err


def test_an_unknown_key_of_a_deepspeed_section_is_refused_as_a_run_refuses_it(tmp_path, capsys):
    (path := tmp_path / "mine.json").write_text('{"zero_optimization": {"overlap_com": true}}')
    assert main(["plan", "small", f"training.deepspeed={path}"]) == 2
    assert "unknown key 'overlap_com'; did you mean 'overlap_comm'?" in capsys.readouterr().err


def test_an_existing_corpus_gives_the_vocabulary_and_the_epochs(corpus):
    words = [f"data.corpus={corpus}", "data.packing=best-fit"]
    config = recipes.load("demo", words)
    planned = plan.plan(config, 2, "a100")
    assert planned.parameters == needs.parameters(presets.build("small", "zero-clap", 400, {}))
    source = BestFitBlocks(Corpus(corpus, "train"), 128)
    assert planned.reading[""].epochs == config.training.steps * 16 / len(source)
    text = plan.table(planned)
    assert f" of {len(source)} blocks, {source.fill:.1%} full, which hold 100.0% of the" in text
    for epochs, warned in ((40.0, False), (40.5, True)):
        reading = {"": dataclasses.replace(planned.reading[""], epochs=epochs)}
        text = plan.table(dataclasses.replace(planned, reading=reading))
        assert ("WARNING: beyond 40 epochs" in text) == warned


def test_a_mixture_gives_the_epochs_of_each_corpus(corpus, other_corpus):
    weights = f"data.corpora={{a: {{path: {corpus}}}, b: {{path: {other_corpus}, weight: 3}}}}"
    config = recipes.load("small", [weights, "training.steps=20", "schedule.warmup_steps=2"])
    reading = plan.plan(config, 2, "a100").reading
    read = [reading[name].epochs * reading[name].blocks for name in ("a", "b")]
    assert read == pytest.approx([80, 240])
    lines = plan.table(plan.plan(config, 2, "a100")).splitlines()
    assert [line[:15] for line in lines[2:4]] == ["epochs       a:", "             b:"]


@pytest.mark.parametrize(
    ("words", "kind", "measured"),
    [
        (["pile-base-fast", "model.variant=zero-clap"], "h100", [475_029, 457_500]),
        (["pile-base-fast", "model.variant=baseline"], "h100", [471_805, 459_706, 444_160]),
        (["pile-base", "model.variant=baseline"], "h100", [389_524, 374_025, 329_990]),
        (["pile-base", "model.variant=zero-clap"], "h100", [312_858]),
        (["pile-base", "model.variant=zero-clap", "training.compile=false"], "h100", [277_813]),
        (["modern-base", "data.sequence_length=2048"], "h100", [301_792]),
        (["pile-base-fast", "model.variant=zero-clap"], "h200", [478_762]),
    ],
)
def test_the_hours_follow_from_tokens_a_second_that_were_measured(words, kind, measured):
    """notes/measurements.md: updates of 4 x 16 x 2048 tokens on one GPU."""
    planned = of(*words, gpus=1, kind=kind)
    rate = planned.tokens / planned.seconds
    assert all(rate == pytest.approx(each, rel=0.13) for each in measured)
    assert of(*words, gpus=8, kind=kind).seconds == pytest.approx(planned.seconds / 8)


@pytest.mark.parametrize(("device", "gain"), [(plan.CPU, 1), ("NVIDIA A100", 2)])
def test_more_ranks_than_were_measured_gain_nothing_on_the_cores_of_one_machine(device, gain):
    measured = plan.Measured(device, 10**12, world_size=2, flops=1e12)
    two, four = (plan.plan(recipes.load("pile-base"), ranks, "here", measured) for ranks in (2, 4))
    assert two.seconds == two.flops / 2e12
    assert four.seconds == two.seconds / gain


@pytest.mark.parametrize(
    ("words", "kind"),
    [([], "a100"), (["training.deepspeed=zero1_fp32"], "h100"), ([], "h200")],
    ids=str,
)
def test_hours_that_nobody_has_measured_are_unknown(words, kind):
    planned = of("pile-base", *words, kind=kind)
    assert planned.seconds is None
    assert f"unknown: recipes of this kind were not measured on {kind}" in plan.table(planned)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(119, "119 seconds"), (120, "2.0 minutes"), (86_000, "23.9 hours"), (820_800, "9.5 days")],
)
def test_times_have_a_unit_that_fits(seconds, text):
    planned = dataclasses.replace(of("pile-base"), seconds=seconds)
    assert f"time         about {text} on" in plan.table(planned)


def test_the_checkpoints_of_the_pile_recipe():
    """The 10 newest, and two from thousands of steps before."""
    planned = of("pile-base")
    assert (planned.checkpoints_usual, planned.checkpoints_most) == (12, 26)
    text = plan.table(planned)
    assert "1.76 GB each; 12 kept (21.15 GB), at most 26 after loss spikes (45.83 GB)" in text


PUBLISHED = ("baseline", "sinusoidal", "alibi", "learned-clap", "zero-clap")
NO_DROPOUT = "model.overrides.attention_dropout=0.0"


@pytest.mark.parametrize("variant", PUBLISHED)
@pytest.mark.parametrize("recipe", ["pile-base", "pile-large"])
def test_the_pile_recipes_fit_the_machine_of_the_study_as_they_are(recipe, variant):
    """8 A100 with 40 GB, with dropout and `dense`, and without it and `flex`."""
    for words, backend in (([], "dense"), ([NO_DROPOUT], "flex")):
        planned = of(recipe, f"model.variant={variant}", *words, kind="a100-40gb")
        assert planned.backend == backend
        assert planned.memory[planned.stage].fits(40e9)
        assert "does not fit" not in plan.table(planned)


def test_the_table_says_what_does_not_fit():
    large = of("pile-large", "batch.micro_batch_size=32", kind="a100-40gb")
    assert not large.memory[1].fits(40e9)
    text = plan.table(large)
    assert "micro-batches of 32 and dense attention; a100-40gb has 40.00 GB" in text
    assert text.count("(does not fit)") == 3
    assert text.count("GB <- the recipe's (does not fit)") == 1


def test_offloaded_state_takes_no_memory_of_the_gpu():
    memory = of("pile-base", "training.deepspeed=zero2_bf16_offload").memory[2]
    room = (memory.total - memory.optimizer) / devices.HEADROOM
    assert memory.fits(room)
    assert not dataclasses.replace(memory, offloaded=False).fits(room)


def test_an_offload_that_is_null_is_planned_as_none(tmp_path):
    settings = json.loads((DS_CONFIGS / "zero2_bf16.json").read_text())
    settings["zero_optimization"] |= {"offload_optimizer": None, "offload_param": None}
    (tmp_path / "null.json").write_text(json.dumps(settings))
    names = tmp_path / "null.json", "zero2_bf16"
    null, plain = (recipes.load("pile-base", [f"training.deepspeed={name}"]) for name in names)
    assert plan.plan(null, 8, "h100").memory == plan.plan(plain, 8, "h100").memory
    model = plan.model_of(null)
    assert needs.least_states(null, model, 8) == needs.least_states(plain, model, 8)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100-PCIE-40GB", "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H200 NVL", None),
        ("Tesla T4", None),
    ],
)
def test_a_card_is_known_by_its_name(name, kind):
    assert devices.kind_of(name) == kind


def test_a_plan_of_phases_is_the_sum_of_their_plans_and_holds_the_heaviest():
    rest = {"data": {"sequence_length": 512}, "objective": {"probability": 0.3}}
    phases = json.dumps([{"steps": 100}, rest])
    schedule = ("schedule.warmup_steps=10", "training.deepspeed=zero1_bf16")
    phased = of("pile-base", f"phases={phases}", "training.steps=300", *schedule)
    long = of("pile-base", "training.steps=100", *schedule)
    short_settings = ("data.sequence_length=512", "objective.probability=0.3")
    short = of("pile-base", "training.steps=200", *short_settings, *schedule)
    assert phased.tokens == long.tokens + short.tokens
    assert phased.flops == pytest.approx(long.flops + short.flops)
    assert phased.seconds == pytest.approx(long.seconds + short.seconds)
    assert phased.memory == long.memory
