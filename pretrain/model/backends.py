"""The attention back ends, and the choice between them."""

from typing import Final

from .checks import check_value
from .config import ModelConfig

ATTENTION_BACKENDS = ("dense", "flex")
"""Attention back ends. They differ in speed only, so this is not a field of the record.
dense: scaled_dot_product_attention with a float bias, on any device; flex: FlexAttention, on
CUDA."""
AUTOMATIC: Final = "auto"
"""The setting that leaves the choice of the back end to `choose_backend`."""
SMALLEST_FLEX_HEAD = 16
"""FlexAttention's kernels refuse smaller heads on a GPU (torch 2.13, _inductor/kernel/flex)."""


def check_backend(config: ModelConfig, backend: str) -> None:
    """Check that an attention back end is known and can compute the model.

    Raises:
        ValueError: the back end is unknown, or is FlexAttention and the model has attention
            dropout or latents, which it does not support.
    """
    known, name = ATTENTION_BACKENDS, "attention_backend"
    check_value(name, backend, backend in known, known)
    for field in ("latents", "attention_dropout"):
        value = getattr(config, field)
        expected = f"'dense' with {field} {value}; 'flex' needs {field} 0"
        check_value(name, backend, backend == "dense" or value == 0, expected)


def choose_backend(config: ModelConfig, wanted: str, on_gpu: bool) -> str:
    """Return the attention back end of a run.

    "auto" stands for flex on a GPU if it can compute the model, and for dense otherwise: flex makes
    no [T, T] tensor, but has no attention dropout, no latents and no heads below 16. Where the bias
    is trained, too: flex adds the gradient of each score to one of few numbers, by atomic additions
    that wait for each other (a hundred times as long on an H100) and in no fixed order.

    Args:
        config: the model.
        wanted: "auto", or the back end that the recipe names, which is returned as it is.
        on_gpu: whether the run uses GPUs.
    """
    if wanted != AUTOMATIC:
        return wanted
    is_possible = (
        config.attention_dropout == 0
        and not config.latents
        and not config.has_trained_bias
        and config.hidden_size // config.num_heads >= SMALLEST_FLEX_HEAD
    )
    return "flex" if on_gpu and is_possible else "dense"
