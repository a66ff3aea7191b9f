"""ModelConfig, and the named models of presets."""

import dataclasses

import pytest

from data_prep.common.records import decode
from pretrain.model import presets
from pretrain.model.config import CHOICES, ModelConfig

VARIANTS = sorted(presets.VARIANTS)


def build(size="base", variant="baseline", **changes):
    return presets.build(size, variant, 10, changes)


def test_every_third_layer_of_modern_sees_the_whole_document_the_first_among_them():
    assert presets.build("base", "modern", 1000, {}).windows == (0, 128, 128) * 4
    assert presets.build("base", "baseline", 1000, {}).windows == (0,) * 12


@pytest.mark.parametrize("size", sorted(presets.SIZES))
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_named_model_survives_its_json(size, variant):
    if (
        presets.VARIANTS[variant].get("head") in ("clap", "tied")
        and "embedding_size" in presets.SIZES[size]
    ):
        with pytest.raises(ValueError, match=r"^embedding_size: \d+ is not accepted"):
            presets.build(size, variant, 1000, {})
        return
    config = presets.build(size, variant, 1000, {})
    assert decode(ModelConfig, dataclasses.asdict(config)) == config


def test_a_record_may_lack_fields_with_a_default_and_no_others():
    """An earlier version did not write a field that was added since."""
    config = presets.build("base", "zero-clap", 1000, {})
    for name, value in dataclasses.asdict(ModelConfig(vocab_size=1)).items():
        values = dataclasses.asdict(config)
        values.pop(name)
        if name == "vocab_size":
            with pytest.raises(ValueError, match="vocab_size: is missing"):
                decode(ModelConfig, values)
        else:
            assert decode(ModelConfig, values) == dataclasses.replace(config, **{name: value})


LATENTS = {"size": "char", "variant": "char-perceiver"}
ALBERT = {"size": "tiny", "variant": "albert", "embedding_size": 16}
ODD = {"hidden_size": 9, "num_heads": 3}


@pytest.mark.parametrize(
    ("field", "values"),
    [
        *((name, {name: "nope"}) for name in ("position", *CHOICES)),
        *((name, {name: 0}) for name in ("num_layers", "global_every", "intermediate_size")),
        *((name, {name: -2}) for name in ("position_offset", "segments", "local_window")),
        *(("layer_groups", {"layer_groups": groups}) for groups in (0, 5, 3)),
        *(("embedding_size", {"embedding_size": size}) for size in (1024, -1)),
        ("dropout", {"dropout": 1.0}),
        ("attention_dropout", {"attention_dropout": -0.1}),
        ("local_window", {"local_window": 7}),
        ("hidden_size", {"num_heads": 5}),
        ("hidden_size", {**ODD, "position": "sinusoidal"}),
        ("hidden_size", {**ODD, "position": "rotary"}),
        ("num_heads", {**ODD, "position": "alibi", "alibi": "one-sided"}),
        ("final_norm", {"final_norm": True}),
        ("pair_head", {**ALBERT, "pair_head": True, "causal": True}),
        ("embedding_size", {**ALBERT, "head": "clap"}),
        ("embedding_size", {**ALBERT, "head": "tied"}),
        # A wrong kind must not surface later as a TypeError, or as a truth value.
        *(("num_layers", {"num_layers": value}) for value in ("two", 2.5)),
        *((name, {name: True}) for name in ("hidden_size", "position")),
        *((name, {name: "yes"}) for name in ("causal", "gated", "embedding_norm", "dropout")),
        *((name, {name: 1}) for name in ("biases", "final_norm", "normalize_embeddings")),
        *(("initial_beta", {"initial_beta": value}) for value in (None, 2**128, -1e39)),
        ("layer_norm_epsilon", {"layer_norm_epsilon": -1e-5}),
        *(("latents", {**LATENTS, "latents": value}) for value in (-1, 8.0)),
        *(
            ("latents", {**LATENTS, **others})
            for others in (
                *({"biases": False}, {"local_window": 8}, {"causal": False}, {"sharing": "all"}),
                *({"num_layers": 1}, {"layer_norm": "post", "final_norm": False}),
                {"position": "alibi", "alibi": "one-sided"},
            )
        ),
    ],
    ids=str,
)
def test_a_field_that_cannot_be_is_refused_by_name(field, values):
    with pytest.raises(ValueError, match=rf"^{field}: .* is not accepted; it must be "):
        build(**values)


def test_a_refusal_names_the_value_and_what_is_accepted():
    with pytest.raises(ValueError, match="^layer_norm_epsilon: 0.0 .* 1e-30 or above$"):
        ModelConfig(vocab_size=97, layer_norm_epsilon=0.0)
    with pytest.raises(ValueError, match="^layer_norm: 'mid' .* must be one of post, pre$"):
        ModelConfig(10, layer_norm="mid")
    with pytest.raises(ValueError, match=r"hidden_size: 9 .* 6 \(3 heads, rotary positions\)"):
        ModelConfig(10, **ODD, position="rotary")
    with pytest.raises(ValueError, match="latents: 64 .* others need biases true; local_window 0"):
        presets.build("char", "char-perceiver", 10, {"biases": False, "local_window": 8})


@pytest.mark.parametrize(
    "values", [ODD, {**ODD, "alibi": "one-sided"}, {**ALBERT, "head": "tied", "embedding_size": 32}]
)
def test_what_a_model_does_not_use_is_not_refused(values):
    build(**values)


def test_a_number_may_be_written_as_a_whole_one():
    from pretrain.model.language_model import LanguageModel

    whole = {f.name: 1 for f in dataclasses.fields(ModelConfig) if f.type == "float"}
    whole |= {"dropout": 0, "attention_dropout": 0}
    model = LanguageModel(build("tiny", "zero-clap", **whole))
    assert all(weight.is_floating_point() for weight in model.parameters())
