"""ModelConfig, and the named models of presets."""

import dataclasses
import json

import pytest

from pretrain.model import presets
from pretrain.model.config import ModelConfig

VARIANTS = sorted(presets.VARIANTS)


def test_every_third_layer_of_modern_sees_the_whole_document_the_first_among_them():
    assert presets.build("base", "modern", 1000, {}).windows == (0, 128, 128) * 4
    assert presets.build("base", "baseline", 1000, {}).windows == (0,) * 12


@pytest.mark.parametrize("values", [{"biases": False}, {"local_window": 8}])
def test_latents_refuse_what_their_layers_do_not_compute(values):
    with pytest.raises(
        ValueError, match="latents: 64 .* others need .*(biases true|local_window 0)"
    ):
        presets.build("char", "char-perceiver", 1000, values)


@pytest.mark.parametrize("size", sorted(presets.SIZES))
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_named_model_survives_its_json(size, variant):
    if (
        presets.VARIANTS[variant].get("head") in ("clap", "tied")
        and "embedding_size" in presets.SIZES[size]
    ):
        with pytest.raises(ValueError, match=r"model.embedding_size: \d+ is not accepted"):
            presets.build(size, variant, 1000, {})
        return
    config = presets.build(size, variant, 1000, {})
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_a_record_may_lack_fields_with_a_default_and_no_others():
    """An earlier version did not write a field that was added since."""
    config = presets.build("base", "zero-clap", 1000, {})
    for name, value in ModelConfig(vocab_size=1).to_dict().items():
        values = config.to_dict()
        values.pop(name)
        if name == "vocab_size":
            with pytest.raises(ValueError, match=r"missing \['vocab_size'\], unknown \[\]"):
                ModelConfig.from_dict(values)
        else:
            assert ModelConfig.from_dict(values) == dataclasses.replace(config, **{name: value})


def test_a_record_with_an_unknown_field_is_refused_by_its_name():
    values = {**ModelConfig(vocab_size=10).to_dict(), "alibbi": "offset"}
    with pytest.raises(ValueError, match=r"model config: missing \[\], unknown \['alibbi'\]"):
        ModelConfig.from_dict(values)


@pytest.mark.parametrize(
    ("field", "value", "accepted"),
    [
        ("position", "nope", "learned, sinusoidal, rotary, t5-bias, alibi, none"),
        ("alibi", "causal", "offset, symmetric, one-sided, by-direction"),
        ("alibi_slopes", "learned", "fixed, trained"),
        ("layer_norm", "none", "post, pre"),
        ("activation", "swish", "gelu, gelu-tanh, relu"),
        ("head", "linear", "roberta, clap, tied"),
        ("causal", "yes", "true or false"),
        ("num_layers", 0, "positive"),
        ("gated", "yes", "true or false"),
        ("biases", 0, "true or false"),
        ("local_window", 7, "even: half of it on each side"),
        ("local_window", -2, "0 or a positive number"),
        ("global_every", 0, "positive"),
        ("intermediate_size", 0, "positive"),
        ("dropout", 1.0, r"in \[0, 1\)"),
        ("attention_dropout", -0.1, r"in \[0, 1\)"),
        ("sharing", "some", "none, all, attention, feed-forward"),
        ("initial_weights", "uniform", "normal, truncated-normal"),
        ("layer_groups", 0, "positive"),
        ("layer_groups", 5, "a divisor of num_layers 12"),
        ("layer_groups", 3, "1 where sharing is 'none'"),
        ("embedding_size", 1024, "0 to hidden_size 768"),
        ("embedding_size", -1, "0 to hidden_size 768"),
        ("position_offset", -1, "0 or a positive number"),
        ("segments", -2, "0 or a positive number"),
        ("num_heads", 5, r"a multiple of 5 \(5 heads, learned positions\)"),
        # A wrong kind must not surface later as a TypeError, or as a truth value.
        ("num_layers", "two", "whole number"),
        ("num_layers", 2.5, "whole number"),
        ("hidden_size", True, "whole number"),
        ("embedding_norm", "none", "true or false"),
        ("normalize_embeddings", 1.0, "true or false"),
        ("dropout", "much", "number"),
        ("initial_beta", None, "number"),
        ("position", 3, "one of learned"),
    ],
)
def test_a_field_out_of_its_choices_or_kind_is_refused_by_name(field, value, accepted):
    with pytest.raises(ValueError, match=accepted) as caught:
        dataclasses.replace(ModelConfig(vocab_size=10), **{field: value})
    assert "model." in str(caught.value)
    assert repr(value) in str(caught.value) or field == "num_heads"


def test_unknown_names_of_models_are_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="'huge' is not one of base, large"):
        presets.build("huge", "baseline", 10, {})
    with pytest.raises(ValueError, match="'clap' is not one of baseline"):
        presets.build("tiny", "clap", 10, {})
