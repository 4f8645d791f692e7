import math, torch, triton, triton.language as tl
from flamia.hopper import launch as L
from flamia.hopper.launch import *
from flamia.hopper.launch import encode
import fused4

@triton.jit
def dq_out_kernel(DQ, TURNS, OUT, Q_BLOCKS, COUNTS, q_pad, scale, hq, D: tl.constexpr):
    block = tl.program_id(0) // 2
    half = tl.program_id(0) % 2
    h = tl.program_id(1)
    if block < tl.load(COUNTS):
        row = tl.load(Q_BLOCKS + block * 16)
        valid = tl.load(Q_BLOCKS + block * 16 + 1)
        tile = (h * q_pad + block * 128) // 64 + half
        x = tl.load(DQ + tile.to(tl.int64) * (64 * D) + tl.arange(0, 64 * D))
        x = tl.reshape(x, [2, D // 16, 4, 8, 4, 2, 2])
        x = tl.reshape(tl.permute(x, [2, 5, 3, 0, 1, 4, 6]), [64, D])
        x = tl.where(tl.load(TURNS + tile) > 0, x * scale, 0.0)
        r = half * 64 + tl.arange(0, 64)
        at = (row + r).to(tl.int64)[:, None] * (hq * D) + h * D + tl.arange(0, D)[None, :]
        tl.store(OUT + at, x.to(OUT.dtype.element_ty), mask=(r < valid)[:, None])

def half_tiles(x, rows):
    t, h, d = x.shape
    return TensorDescriptor(x, [t, h * d], [x.stride(0), 1], [rows, d // 2], gl.NVMMASharedLayout(min(128, d), 16, 2))

def order(plan):
    n = int(plan.counts[1]); b = plan.k_blocks[:n]
    num = b[:, 3] // 128
    doc = torch.arange(n, device=b.device) - num
    size = torch.zeros(n, dtype=torch.int64, device=b.device).index_add_(0, doc.long(), torch.ones(n, dtype=torch.int64, device=b.device))[doc.long()]
    key = ((-size) * 100000 + doc) * 100000 - num
    out = plan.k_blocks.clone(); out[:n] = b[torch.argsort(key)]
    return out

def prepare(do, dlse, q, k, v, o, lse, documents, scale, saved):
    (tq, hq, d), (tk, hk, _) = q.shape, k.shape
    e = saved if saved is not None else encode(q, k, v, documents, scale)
    q, k = packed(q), packed(k)
    layout = e.plan; device = q.device
    q_pad, k_pad = layout.q_capacity * BLOCK, layout.k_capacity * BLOCK
    g_codes = torch.empty(hq, q_pad, d, dtype=torch.float8_e4m3fn, device=device)
    g_wide = torch.empty(hq, q_pad, d, dtype=torch.bfloat16, device=device)
    lse2, delta = torch.empty(2, hq * q_pad, dtype=torch.float32, device=device)
    encode_gradient_kernel[(layout.q_capacity * (BLOCK // ROWS), hq)](
        do, o, lse, lse if dlse is None else dlse, g_codes, g_wide, lse2, delta, layout.q_blocks, layout.counts,
        do.stride(0), do.stride(1), o.stride(0), o.stride(1), lse.stride(0), 0 if dlse is None else dlse.stride(1),
        0 if dlse is None else dlse.stride(0), q_pad, HAS_DLSE=dlse is not None, D=d, ROWS=ROWS, num_warps=4)
    q_clean, k_clean = cleaned(q, layout), cleaned(k, layout)
    left, right = sides(documents)
    dq = torch.empty(tq, hq, d, dtype=q.dtype, device=device)
    dk, dv = (torch.empty(tk, hk, d, dtype=k.dtype, device=device) for _ in range(2))
    sums = torch.empty(hq * q_pad * d, dtype=torch.float32, device=device)
    turns = torch.zeros(hq * q_pad // 64, dtype=torch.int32, device=device)
    errors = torch.zeros(1, dtype=torch.int32, device=device)
    items = order(layout)
    kwargs = {}
    class P: pass
    p = P()
    p.dq, p.dk, p.dv, p.errors, p.turns, p.sums, p.layout = dq, dk, dv, errors, turns, sums, layout
    p.reset = lambda: layout.counts[8:10].zero_()
    m64 = 64
    def fused_call(V=4, **kw):
        turns.zero_()
        width = p.width if hasattr(p, "width") else heads_together(layout.k_capacity, device)
        if V == 4:
            flat = TensorDescriptor(sums, [sums.numel() // (d // 2), d // 2], [d // 2, 1], [64, d // 2], gl.NVMMASharedLayout(0, 32, 2))
            return fused4.fused_kernel[grid(layout.k_capacity * hk, device)](
                tiles(e.k_codes, 64), tiles(e.v_codes, 64), half_tiles(k, 64), half_tiles(k_clean, 64),
                tiles(e.q_codes, 64), tiles(g_codes, 64), packed_tiles(q, 64), packed_tiles(q_clean, 64), tiles(g_wide, 64),
                vectors(e.q_factor, 64), vectors(lse2, 64), vectors(delta, 64), flat, dk, dv, e.k_factor, e.v_factor, turns, errors, items,
                layout.counts, q_pad, k_pad, scale, left, right, hk, hq // hk, width, D=d, BM=64, LEFT=left < OPEN, num_warps=4, **kw)
    def out_call():
        dq_out_kernel[(layout.q_capacity * 2, hq)](sums, turns, dq, layout.q_blocks, layout.counts, q_pad, scale, hq, D=d, num_warps=4)
    kv_tuning, q_tuning = TUNING["dkv", d], TUNING["dq", d]
    bm, bn = kv_tuning["BM"], q_tuning["BN"]
    p.dq2, p.dk2, p.dv2 = torch.empty_like(dq), torch.empty_like(dk), torch.empty_like(dv)
    window = left < OPEN
    def two_call():
        dkv_kernel[grid(layout.k_capacity * hk, device)](
            tiles(e.k_codes, 64), tiles(e.v_codes, 64), tiles(e.q_codes, bm), tiles(g_codes, bm), packed_tiles(q, bm),
            packed_tiles(q_clean, bm), tiles(g_wide, bm), vectors(e.q_factor, bm), vectors(lse2, bm), vectors(delta, bm), p.dk2, p.dv2, e.k_factor, e.v_factor,
            layout.k_items, layout.counts, q_pad, k_pad, scale, left, right, hk, hq // hk,
            heads_together(layout.k_capacity, device), D=d, LEFT=window, num_warps=4, **kv_tuning)
        dq_kernel[grid(layout.q_capacity * hq, device)](
            tiles(e.q_codes, 64), tiles(g_codes, 64), tiles(e.k_codes, bn), tiles(e.v_codes, bn), packed_tiles(k, bn), packed_tiles(k_clean, bn),
            vectors(e.k_factor, bn), vectors(e.v_factor, bn), p.dq2, e.q_factor, lse2, delta, layout.q_items, layout.counts,
            q_pad, k_pad, scale, left, right, hq, hq // hk,
            heads_together(layout.q_capacity, device), D=d, LEFT=window, num_warps=4, **q_tuning)
    p.fused, p.out, p.two = fused_call, out_call, two_call
    return p
