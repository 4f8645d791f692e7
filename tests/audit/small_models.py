"""Language models of a few lines, sound ones and ones whose attention does what it should not."""

import torch
from torch import nn

from flamia.audit.controls import shared_scale

VOCABULARY, WIDTH = 61, 16


def grouped_scale(x, size=32, start=0):
    """E4M3 under one scale for each ``size`` positions of (T, H, D), counted from ``start`` positions before."""
    out, edge = x.clone(), 0
    while edge < len(x):
        stop = min((edge + start) // size * size + size - start, len(x))
        out[edge:stop] = shared_scale(x[edge:stop]).to(x.dtype)
        edge = stop
    return out


class Attention(nn.Module):
    """One head of exact causal attention; ``spoil`` does something to its values, (B, T, D), that it should not."""

    def __init__(self, spoil=None):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.spoil = spoil

    def forward(self, x):
        q, k, v = self.query(x), self.key(x), self.value(x)
        if self.spoil is not None:
            v = self.spoil(v)
        seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        return (q @ k.mT / 4).masked_fill(~seen, -torch.inf).softmax(-1) @ v


class Small(nn.Module):
    """Embedding, attentions with a residual, logits."""

    def __init__(self, *spoils, drop=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.drop = nn.Embedding(VOCABULARY, WIDTH), nn.Dropout(drop)
        self.layers = nn.ModuleList(Attention(spoil) for spoil in spoils)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + self.drop(layer(x))
        return self.head(x)


def mean(v):
    return v - 0.1 * v.mean(1, keepdim=True)


def by_sequence(v):
    return torch.stack([grouped_scale(x[:, None])[:, 0] for x in v])


def by_address(v):
    return grouped_scale(v.flatten(0, 1)[:, None])[:, 0].view_as(v)


def current_scaling(v):
    return shared_scale(v.flatten(0, 1)[:, None])[:, 0].view_as(v).to(v.dtype)
