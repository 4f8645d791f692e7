"""Forty faults of one correct attention, each of another kind and size: the auditor's own examination.

A mutant replaces one part of ``parts.Attention``. They were written from what kernels do (scales shared by tiles,
statistics, masks off by one, tails read past their end, state kept between calls) without a look at what the probes
find, and none is left out because it escapes. What escapes is in
docs/lab-log.md.
"""

from __future__ import annotations

import torch
from audit.parts import Call
from audit.register import LEFT, MUTANTS, mutant
from torch import Tensor

from flamia.audit.controls import by_groups, e4m3, shared_scale

__all__ = ["LEAST", "MUTANTS", "SIZES"]

LEAST = {"quick": 36, "thorough": 39}  # to be caught of the forty
SIZES = {"heads": (2, 1), "head_dim": 16}


# Scales shared by tokens: every operand and intermediate, groups of 2 to 128 and whole documents.


@mutant("v")
def v_pairs(v: Tensor, c: Call) -> Tensor:
    """V in E4M3, one scale for two tokens."""
    return by_groups(v, 2, c.spans, shared_scale)


@mutant("k")
def k_addresses(k: Tensor, c: Call) -> Tensor:
    """K in E4M3, one scale for 16 addresses of the buffer."""
    return by_groups(k, 16, [(0, c.total)], shared_scale)


@mutant("q")
def q_eight(q: Tensor, c: Call) -> Tensor:
    """Q in E4M3, one scale for 8 tokens."""
    return by_groups(q, 8, c.spans, shared_scale)


@mutant("v")
def v_one_head(v: Tensor, c: Call) -> Tensor:
    """V in E4M3 with one scale for the document, in the last head only."""
    out = v.clone()
    out[:, -1:] = by_groups(v[:, -1:], c.total, c.spans, shared_scale)
    return out


@mutant("k")
def k_one_feature(k: Tensor, c: Call) -> Tensor:
    """One feature of K in E4M3 with a scale for 64 tokens; the others exact."""
    out = k.clone()
    out[..., 5:6] = by_groups(k[..., 5:6], 64, c.spans, shared_scale)
    return out


@mutant("dq_do")
def do_for_dq(do: Tensor, c: Call) -> Tensor:
    """dQ reads dO in E4M3, one scale for 64 tokens; O, dK and dV are exact."""
    return by_groups(do, 64, c.spans, shared_scale)


def tiled(x: Tensor, rows: int, columns: int, spans: list[tuple[int, int]]) -> Tensor:
    """(H, T, T) in E4M3 with one scale per tile of each document's square; zeros that fill the last tiles move no scale."""
    out = torch.zeros_like(x)
    for a, b in spans:
        wide = min(columns, b - a)
        square = torch.nn.functional.pad(x[:, a:b, a:b], (0, -(b - a) % wide, 0, -(b - a) % rows))
        tiles = square.unflatten(1, (-1, rows)).unflatten(3, (-1, wide))
        rounded = e4m3(tiles, tiles.abs().amax((2, 4), True))
        out[:, a:b, a:b] = rounded.flatten(3).flatten(1, 2)[:, : b - a, : b - a]
    return out


@mutant("p")
def p_tiles(p: Tensor, c: Call) -> Tensor:
    """P in E4M3, one scale for a tile of 16 queries and 16 keys."""
    return tiled(p, 16, 16, c.spans)


@mutant("dq_u")
def u_rows(u: Tensor, c: Call) -> Tensor:
    """U in E4M3 for dQ, one scale for 4 rows."""
    return tiled(u, 4, c.total, c.spans)


@mutant("o")
def o_tiles(o: Tensor, c: Call) -> Tensor:
    """O leaves in E4M3 with one scale for 24 rows."""
    return by_groups(o, 24, c.spans, shared_scale)


@mutant("dq")
def dq_half(dq: Tensor, c: Call) -> Tensor:
    """dQ is kept in float16 under one power of two for 128 rows."""

    def half(x: Tensor) -> Tensor:
        boost = torch.exp2(torch.floor(torch.log2(2.0**15 / x.abs().amax().clamp_min(1e-300))))
        return (x * boost).half().double() / boost

    return by_groups(dq, 128, c.spans, half)


@mutant("s")
def s_integers(s: Tensor, c: Call) -> Tensor:
    """Scores become 8-bit integers with one step for 64 queries and all keys, before the mask."""
    out = s.clone()
    for a, b in c.spans:
        for i in range(a, b, 64):
            tile = s[:, i : min(i + 64, b), a:b]
            step = tile.abs().amax((1, 2), True).clamp_min(1e-300) / 127
            out[:, i : min(i + 64, b), a:b] = (tile / step).round() * step
    return out


# The softmax.


def on_e4m3_grid(e: Tensor, c: Call) -> Tensor:
    return e4m3(e, torch.tensor(448.0, dtype=torch.float64))


@mutant("m", e=on_e4m3_grid)
def maximum_before_mask(m: Tensor, c: Call) -> Tensor:
    """The maximum is taken over the whole tile of 32 keys, masked or not; exponentials have E4M3's grid."""
    tile = c.same & (c.pos[None, :] // 32 <= c.pos[:, None] // 32)
    return c.scores.masked_fill(~tile, -torch.inf).amax(-1, keepdim=True)


@mutant("m", e=on_e4m3_grid)
def maximum_carried(m: Tensor, c: Call) -> Tensor:
    """The running maximum is not set back where a document begins; exponentials have E4M3's grid."""
    out = m.clone()
    for a, b in c.spans[1:]:
        rows = slice(a, min(a + 4, b))
        out[:, rows] = torch.maximum(out[:, rows], out[:, a - 1 : a])
    return out


@mutant("l")
def normaliser_sees_ahead(l: Tensor, c: Call) -> Tensor:
    """One row in 64, in the middle of a tile, counts the key after it in its sum, and only there."""
    s = c.scores.masked_fill(~c.seen, -torch.inf).amax(-1, keepdim=True)
    ahead = (c.scores - s).exp().masked_fill(~(c.same & (c.ahead == 1) & (c.pos % 64 == 50)[:, None]), 0.0)
    return l + ahead.sum(-1, keepdim=True).clamp_max(1e30)


@mutant("s", seen=lambda seen, c: c.same.expand_as(seen))
def mask_is_finite(s: Tensor, c: Call) -> Tensor:
    """Masked scores have 40 subtracted and are kept."""
    return torch.where(c.seen, s, s - 40)


# Statistics: means, signs, ranks, checksums, thresholds.


@mutant("k")
def keys_centred(k: Tensor, c: Call) -> Tensor:
    """K minus its mean over the document, then E4M3 with a scale per token."""
    centred = by_groups(k, c.total, c.spans, lambda x: x - x.mean(0, keepdim=True))
    return e4m3(centred, centred.abs().amax(-1, keepdim=True))


@mutant("v")
def thousandth_of_the_mean(v: Tensor, c: Call) -> Tensor:
    """V plus a thousandth of its mean over the call."""
    return v + 1e-3 * v.mean(0, keepdim=True)


@mutant("v")
def signs_vote(v: Tensor, c: Call) -> Tensor:
    """V grows by 1/64 where most entries of K in 32 tokens are positive, and shrinks elsewhere: signs alone cross."""
    vote = by_groups(c.k.sign(), 32, c.spans, lambda x: x.sum((0, 2), keepdim=True).sign().expand_as(x))
    return v * (1 + 2.0**-6 * vote)


@mutant("p")
def dice_from_a_checksum(p: Tensor, c: Call) -> Tensor:
    """P is rounded at random to multiples of 1/256, and the dice are seeded by the bits of the document's K."""
    out = p.clone()
    for a, b in c.spans:
        dice = torch.Generator().manual_seed(int(c.k[a:b].contiguous().view(torch.int64).sum()) % 2**31)
        shape = p[:, a:b, a:b].shape
        out[:, a:b, a:b] = (p[:, a:b, a:b] * 256 + torch.rand(shape, generator=dice, dtype=p.dtype)).floor() / 256
    return out * c.seen


@mutant("seen")
def keys_chosen_by_block(seen: Tensor, c: Call) -> Tensor:
    """Sixteen queries share a choice of half the earlier keys, made by their mean score, later queries included."""
    out = seen.clone()
    for a, b in c.spans:
        for i in range(a + 16, b, 16):
            mean = c.scores[:, i : min(i + 16, b), a:i].mean(1, keepdim=True)
            out[:, i : min(i + 16, b), a:i] &= mean >= mean.median(-1, keepdim=True).values
    return out


@mutant("o")
def threshold_on_keys(o: Tensor, c: Call) -> Tensor:
    """O of a document is 1/128 larger once some entry of its K exceeds 2^12."""
    large = by_groups(c.k, c.total, c.spans, lambda x: (x.abs().amax() > 2.0**12).double().expand_as(x))
    return o * (1 + 2.0**-7 * large[:, :1, :1])


@mutant("v")
def values_far_ahead(v: Tensor, c: Call) -> Tensor:
    """V of a token holds 1/1024 of the V 129 tokens later."""
    out = v.clone()
    for a, b in c.spans:
        if b - a > 129:
            out[a : b - 129] += 2.0**-10 * v[a + 129 : b]
    return out


# Masks.


@mutant("seen")
def one_ahead_in_one_head(seen: Tensor, c: Call) -> Tensor:
    """The last head sees one token ahead."""
    out = seen.clone()
    out[-1] |= c.same & (c.ahead == 1)
    return out


@mutant("seen")
def one_ahead_at_tile_ends(seen: Tensor, c: Call) -> Tensor:
    """The last row of every tile of 64 sees one token ahead."""
    return seen | (c.same & (c.ahead == 1) & (c.pos % 64 == 63)[:, None])


@mutant("seen")
def last_tile_unmasked(seen: Tensor, c: Call) -> Tensor:
    """No mask inside a document's last, partial tile of 128 rows."""
    last = c.pos // 128 == c.lengths() // 128
    return seen | (c.same & last[:, None] & last[None, :])


@mutant("seen")
def long_documents_see_ahead(seen: Tensor, c: Call) -> Tensor:
    """Documents of more than 256 tokens see one token ahead."""
    return seen | (c.same & (c.ahead == 1) & (c.lengths() > 256)[:, None])


@mutant("seen")
def short_documents_see_all(seen: Tensor, c: Call) -> Tensor:
    """Documents of up to 32 tokens have no causal mask."""
    return seen | (c.same & (c.lengths() <= 32)[:, None])


@mutant("seen")
def two_ahead_beyond_128(seen: Tensor, c: Call) -> Tensor:
    """Rows beyond position 128 see two tokens ahead."""
    return seen | (c.same & (c.ahead > 0) & (c.ahead <= 2) & (c.pos > 128)[:, None])


@mutant("seen", window=True, claims=("mask",))
def window_one_too_long(seen: Tensor, c: Call) -> Tensor:
    """The window's left side is one token too long."""
    return seen | (c.same & (c.ahead == -LEFT - 1))


@mutant("seen", window=True, claims=("mask",))
def window_lost_in_one_head(seen: Tensor, c: Call) -> Tensor:
    """The first head has no window."""
    out = seen.clone()
    out[0] |= c.same & (c.ahead < 0)
    return out


# Packing.


@mutant("seen")
def packing_ends_at_eight(seen: Tensor, c: Call) -> Tensor:
    """Documents from the ninth on are one."""
    return seen | ((c.doc[:, None] >= 8) & (c.doc[None, :] >= 8) & (c.ahead <= 0))


@mutant("seen")
def folded_heads_slip(seen: Tensor, c: Call) -> Tensor:
    """Query heads are folded into rows, and the offsets of documents are off by one folded row: the first row's first
    head belongs to the document before.
    """
    before = (c.pos == 0)[:, None] & (c.doc[None, :] == c.doc[:, None] - 1)
    out = seen.clone()
    out[0] |= before
    return out


@mutant("v")
def tail_reads_on(v: Tensor, c: Call) -> Tensor:
    """The last tile of 32 tokens reads on past the document's end, so the next tokens count in its scale of V."""
    own = v.abs().amax((1, 2), keepdim=True)
    for a, b in c.spans:
        tail, end = a + (b - a) // 32 * 32, min(a + -(-(b - a) // 32) * 32, c.total)
        if tail < b < end:
            own[tail:b] = torch.maximum(own[tail:b], v[b:end].abs().amax())
    return e4m3(v, own)


@mutant("v")
def long_neighbours_count(v: Tensor, c: Call) -> Tensor:
    """Documents longer than 100 tokens count in the scale of everybody's V."""
    own = v.abs().amax((1, 2), keepdim=True)
    loud = own[c.lengths() > 100]
    return e4m3(v, torch.maximum(own, loud.amax()) if len(loud) else own)


# The backward alone.


@mutant("dk")
def dk_per_call(dk: Tensor, c: Call) -> Tensor:
    """dK leaves in E4M3 with one scale for the call."""
    return shared_scale(dk)


@mutant("delta")
def delta_of_two_rows(delta: Tensor, c: Call) -> Tensor:
    """dQ subtracts the mean of two rows' D in place of the row's own."""
    return by_groups(delta.transpose(0, 1), 2, c.spans, lambda x: x.mean(0, True).expand_as(x)).transpose(0, 1)


# State and shape.


@mutant("v")
class scale_of_the_call_before:
    """V in E4M3 under the largest V of the call before."""

    def __init__(self) -> None:
        self.amax = self.last = torch.tensor(1.0, dtype=torch.float64)

    def __call__(self, v: Tensor, c: Call) -> Tensor:
        if not c.backward:  # which reads V as its forward did
            self.last, self.amax = self.amax, v.abs().amax()
        return e4m3(v, self.last)


@mutant("p")
def tiles_by_length(p: Tensor, c: Call) -> Tensor:
    """P in four bits, a step for a row's 16 keys in documents of up to 128 tokens and for 64 keys in longer ones."""
    out = p.clone()
    for a, b in c.spans:
        size = 16 if b - a <= 128 else 64
        tiles = torch.nn.functional.pad(p[:, a:b, a:b], (0, -(b - a) % size)).unflatten(-1, (-1, size))
        step = tiles.amax(-1, keepdim=True).clamp_min(1e-300) / 15
        out[:, a:b, a:b] = ((tiles / step).round() * step).flatten(-2)[..., : b - a]
    return out


def rotated(x: Tensor, c: Call) -> Tensor:
    angle = torch.arange(c.total, dtype=torch.float64)[:, None, None] * 0.1
    a, b = x.chunk(2, -1)
    turned = torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)
    return turned.bfloat16().double()


@mutant("q", k=rotated)
def rotation_by_address(q: Tensor, c: Call) -> Tensor:
    """Q and K are rotated by their address in the buffer, not by their position, and rounded to bfloat16."""
    return rotated(q, c)


@mutant("poison", claims=("nonfinite",))
def nan_fills_tiles(rows: Tensor, c: Call) -> Tensor:
    """Where one row of a tile of 64 sees a NaN, the whole tile does."""
    tile = c.doc * c.total + c.pos // 64
    return torch.isin(tile, tile[rows])
