"""Every architectural choice of a model, as one frozen record. Imports no torch.

Choices such as ALiBi, embedding scale and normalisation leave no trace in the weights, so this
record travels with them: a checkpoint loaded without it would be a silent bag of words.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

CHOICES: dict[str, tuple[str, ...]] = {
    "position": ("learned", "sinusoidal", "alibi", "none"),
    "alibi": ("offset", "symmetric"),
    "head": ("roberta", "clap"),
    "embedding_scale": ("one", "sqrt-hidden"),
    "mask_embedding": ("row", "zero"),
}
ATTENTION_BACKENDS = ("dense", "flex", "flex-flash")
"""How attention is computed: a matter of speed alone, and so no field of the record. dense: over a
float bias, on any device; flex: FlexAttention, on CUDA; flex-flash: its kernels for Hopper and
later, which need the flash-attn-4 package."""
_KINDS: dict[str, tuple[type | tuple[type, ...], str]] = {
    "int": (int, "a whole number"),
    "float": ((int, float), "a number"),
    "bool": (bool, "true or false"),
}


def _check(
    name: str,
    value: object,
    condition: bool,
    accepted: str | tuple[str, ...],
    prefix: str = "model",
) -> None:
    if not condition:
        words = accepted if isinstance(accepted, str) else f"one of {', '.join(accepted)}"
        raise ValueError(f"{prefix}.{name}: {value!r} is not accepted; it must be {words}")


def _check_names(record: type[Any], source: str, values: Mapping[str, object]) -> None:
    fields = dataclasses.fields(record)
    known = {field.name for field in fields}
    needed = {field.name for field in fields if field.default is dataclasses.MISSING}
    missing, unknown = sorted(needed - set(values)), sorted(set(values) - known)
    if missing or unknown:
        raise ValueError(f"{source}: missing {missing}, unknown {unknown}")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Architecture of one model; the defaults are RoBERTa base as trained on the Pile."""

    vocab_size: int
    """Rows of the token embedding. With `mask_embedding` "zero" the mask has none: its id is
    any id from `vocab_size` on."""
    hidden_size: int = 768
    num_layers: int = 12
    num_heads: int = 12
    intermediate_size: int = 3072
    max_positions: int = 2048
    """Longest input trained on; a hard limit for learned positions alone."""
    position: str = "learned"
    alibi: str = "offset"
    """Shape of the bias where `position` is "alibi": offset tells +n from -n by half a step."""
    head: str = "roberta"
    normalize_embeddings: bool = False
    """L2-normalise token embeddings, at the input and in the CLAP head alike."""
    embedding_scale: str = "one"
    embedding_norm: bool = True
    mask_embedding: str = "row"
    initial_beta: float = 1.0
    dropout: float = 0.1
    attention_dropout: float = 0.1
    layer_norm_epsilon: float = 1e-5

    def __post_init__(self) -> None:
        """Refuse values of the wrong kind, outside their choices, and shapes that do not divide."""
        for field in dataclasses.fields(self):
            if field.type in _KINDS:
                value, (kind, words) = getattr(self, field.name), _KINDS[str(field.type)]
                fits = isinstance(value, kind) and isinstance(value, bool) == (kind is bool)
                _check(field.name, value, fits, words)
        for name, accepted in CHOICES.items():
            _check(name, getattr(self, name), getattr(self, name) in accepted, accepted)
        sizes = ("vocab_size", "hidden_size", "num_layers", "num_heads", "intermediate_size")
        for name in (*sizes, "max_positions"):
            _check(name, getattr(self, name), getattr(self, name) >= 1, "a positive number")
        for name in ("dropout", "attention_dropout"):
            _check(name, getattr(self, name), 0.0 <= getattr(self, name) < 1.0, "in [0, 1)")
        divides = self.hidden_size % self.num_heads == 0
        _check("hidden_size", self.hidden_size, divides, f"a multiple of {self.num_heads} heads")
        halves = self.position != "sinusoidal" or self.hidden_size % 2 == 0
        _check("hidden_size", self.hidden_size, halves, "even for sinusoidal positions")

    @property
    def scale(self) -> float:
        """Factor on the token embeddings."""
        return math.sqrt(self.hidden_size) if self.embedding_scale == "sqrt-hidden" else 1.0

    @property
    def has_padding_row(self) -> bool:
        """Whether `<pad>` is a zero row without input gradient.

        The original gives it an ordinary row in its CLAP and zero-mask models, because a zero row
        cannot be normalised.
        """
        return self.head == "roberta" and self.mask_embedding == "row"

    def to_dict(self) -> dict[str, object]:
        """Plain mapping of every field, for `model.json`."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, object], source: str = "model config") -> ModelConfig:
        """The record that a mapping describes, as `to_dict` of this or an earlier version wrote it.

        A field that was added later has a default that means what models were before, so that a
        field with a default may be missing.

        Args:
            values: of the fields by name.
            source: where they are from, for messages.

        Raises:
            ValueError: a field without a default is missing, a field is unknown, or a value is not
                accepted.
        """
        _check_names(cls, source, values)
        return cls(**values)  # type: ignore[arg-type]


def check_backend(config: ModelConfig, backend: str) -> None:
    """Refuse a backend that does not exist, or cannot compute the model.

    Raises:
        ValueError: the backend is unknown, or FlexAttention, which has no dropout, would need it.
    """
    _check("attention_backend", backend, backend in ATTENTION_BACKENDS, ATTENTION_BACKENDS, "model")
    if backend != "dense":
        dropout = config.attention_dropout
        _check("attention_dropout", dropout, dropout == 0, f"0 with attention backend {backend!r}")


POOLINGS = ("first", "mean")


@dataclasses.dataclass(frozen=True)
class ClassificationConfig:
    """One classification head."""

    classes: int
    """Logits it gives; 1 for a regression."""
    labels: tuple[str, ...] = ()
    """A name for each class, in the order of the logits; empty where none are known."""
    pooling: str = "first"
    """What it reads: the feature of `<s>`, or the mean over all real tokens."""
    dropout: float = 0.0

    def __post_init__(self) -> None:
        """Refuse values that no head can have."""
        check = functools.partial(_check, prefix="classification head")
        whole = isinstance(self.classes, int) and not isinstance(self.classes, bool)
        check("classes", self.classes, whole and self.classes >= 1, "a positive number")
        named = isinstance(self.labels, tuple) and all(isinstance(x, str) for x in self.labels)
        fits = named and len(self.labels) in (0, self.classes)
        check("labels", self.labels, fits, f"no name, or one for each of {self.classes} classes")
        check("pooling", self.pooling, self.pooling in POOLINGS, POOLINGS)
        number = isinstance(self.dropout, int | float) and not isinstance(self.dropout, bool)
        check("dropout", self.dropout, number and 0.0 <= self.dropout < 1.0, "in [0, 1)")

    def to_dict(self) -> dict[str, object]:
        """Plain mapping of every field, for `model.json`."""
        return {**dataclasses.asdict(self), "labels": list(self.labels)}

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> ClassificationConfig:
        """The record that a mapping describes; fields with a default may be missing.

        Raises:
            ValueError: `classes` is missing, a field is unknown, or a value is not accepted.
        """
        _check_names(cls, "classification head", values)
        labels = values.get("labels", ())
        fields = {**values, "labels": tuple(labels) if isinstance(labels, list) else labels}
        return cls(**fields)  # type: ignore[arg-type]
