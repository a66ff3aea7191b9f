"""Attention by itself, as the layers call it: cases whose kernels are looked at and compared."""

import dataclasses

import torch

from pretrain.model.attention import AttentionContext, attend, dense_bias
from pretrain.model.config import ModelConfig
from pretrain.model.flex import flex_bias
from pretrain.model.masks import visible_keys
from pretrain.model.positions import position_module


@dataclasses.dataclass(frozen=True)
class Case:
    """A position method and a mask that recipes have, and the size of a head.

    Methods that act on embeddings, queries or keys are "none": they add nothing to scores.
    """

    position: str
    mask: str = "documents"
    """none; padding: bool ids; documents: integer ids of packed rows."""
    alibi: str = "offset"
    slopes: str = "fixed"
    head_size: int = 64
    causal: bool = False
    window: int = 0

    def __str__(self):
        parts = [self.position, self.mask, f"head {self.head_size}"]
        parts += [self.alibi] * (self.position == "alibi") + [self.slopes] * self.is_trained
        parts += ["causal"] * self.causal + [f"window {self.window}"] * bool(self.window)
        return ", ".join(parts)

    @property
    def is_trained(self):
        """Whether the bias on the scores has weights."""
        return self.position == "t5-bias" or self.slopes == "trained"

    def config(self, heads):
        return ModelConfig(
            vocab_size=50,
            hidden_size=heads * self.head_size,
            num_heads=heads,
            position=self.position,
            alibi=self.alibi,
            alibi_slopes=self.slopes,
            causal=self.causal,
            local_window=self.window,
        )


def ids_of(mask, batch, length):
    """[B, T] or None: documents of a third; rows end in padding, the first with a quarter of it."""
    place = torch.arange(length)
    ends = length - length // 4 * (batch - place[:batch, None]) // batch
    if mask == "padding":
        return place < ends
    # No border is one of a tile.
    return (1 + place * 3 // length) * (place < ends) if mask == "documents" else None


def score_bias(case, heads, device):
    """The position method's module, with weights that differ from each other; None without."""
    torch.manual_seed(0)
    module = position_module(case.config(heads).method.score_bias, case.config(heads))
    if case.position == "t5-bias":
        torch.nn.init.normal_(module.table.weight)
    return None if module is None else module.to(device)


def mixed(case, backend, module, qkv, ids, dropout=0.0):
    """What attention makes of [B, T, 3, H, K]: [B, T, H, K]."""
    batch, length, _, heads, _ = qkv.shape
    scores = None if module is None else module(qkv.device, exact=backend == "dense")
    if backend == "flex":
        bias = flex_bias(scores, ids, length, case.causal, case.window, qkv.device)
    else:
        x = qkv.new_empty(batch, length, 0)
        bias = dense_bias(scores, ids, heads, x, causal=case.causal, window=case.window)
    return attend(qkv, AttentionContext(bias), dropout)


def gradients(case, backend, module, qkv, ids, weights):
    """The output, and the gradients of qkv and of the bias's weights, where `weights` weigh it."""
    leaf = qkv.detach().requires_grad_()
    output = mixed(case, backend, module, leaf, ids)
    trained = [] if module is None else list(module.parameters())
    return [output.detach(), *torch.autograd.grad(output, [leaf, *trained], weights)]


def sees_a_key(case, ids, length):
    """Bool [B, T]: whether a query sees any key, in every head."""
    rule = visible_keys(ids, case.causal, case.window)
    place = torch.arange(length)
    batch = 1 if ids is None else len(ids)
    if rule is None:
        return torch.ones(batch, length, dtype=torch.bool)
    row = torch.arange(batch)[:, None, None]
    return rule(row, place[:1], place[:, None], place).expand(batch, length, length).any(-1)
