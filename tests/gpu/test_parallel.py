"""Context parallel on cards: the bits of one. Two and four processes on one card with gloo, or one card each with NCCL."""

import pytest
import torch

if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs an NVIDIA Hopper GPU", allow_module_level=True)

import traceback
from datetime import timedelta

import torch.distributed as dist
import torch.multiprocessing as mp

import flamia
from flamia.codes import encode_tokens, token_values
from flamia.integrations import parallel_rows
from flamia.integrations.parallel import ContextParallel

LIMIT = timedelta(seconds=90)  # of a collective, should a rank be lost
# lengths, (heads, key heads), D, window, options of the recipe
CASES = (
    ((5000,), (4, 2), 128, None, {}),
    ((3000, 1, 0, 129, 300, 64, 128), (4, 2), 64, None, {}),
    ((4000, 300), (2, 2), 128, (500, 0), {}),
    ((90,), (2, 1), 64, None, {}),
    ((3000, 200), (2, 1), 128, None, {"frontier_scores": "bf16"}),
    ((3000, 200), (2, 1), 128, (500, 0), {"frontier_scores": "bf16", "delta": "compensated"}),
)


def run(rank: int, ranks: int, backend: str, folder: str, sizes: tuple[int, ...]) -> None:
    """Every size: the first so many ranks as a group, while the others wait."""
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=f"file://{folder}/meet", rank=rank, world_size=ranks, timeout=LIMIT)
    for size in sizes:
        group = dist.new_group(list(range(size)), timeout=LIMIT)
        try:
            if rank < size:
                compare(device, group)
        except BaseException:
            with open(f"{folder}/failed-{size}-{rank}", "w") as file:
                file.write(f"rank {rank} of {size}: {traceback.format_exc()}")
        dist.barrier()
    dist.destroy_process_group()


def compare(device: torch.device, group: dist.ProcessGroup) -> None:
    wrong = []
    for lengths, heads, dim, window, options in CASES:
        recipe = flamia.Recipe.strict(**options)
        torch.manual_seed(0)
        shapes = [(sum(lengths) + 3, h, dim) for h in (heads[0], heads[1], heads[1], heads[0])]
        q, k, v, do = (torch.randn(shape).to(device, torch.bfloat16) for shape in shapes)
        k[70, 0, 3] = torch.nan
        v[40, 0] = torch.finfo(torch.bfloat16).max  # its codes stand for more than bfloat16 holds
        do[::5] *= 228 * 2.0**-9 / do[::5].abs().amax(-1, keepdim=True)  # down to 224 units, whose own scale is smaller
        cu = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        o, lse = flamia.attention_varlen(*leaves, cu, causal=True, window=window, return_lse=True, recipe=recipe)
        want = [o.detach(), lse.t(), *torch.autograd.grad(o, leaves, do)]
        here = ContextParallel(cu, window=window, group=group, recipe=recipe)
        mine = [here.shard(x.detach()).requires_grad_() for x in (q, k, v)]
        o, lse = here.attention(*mine, return_lse=True)
        got = [o.detach(), lse.detach().t(), *torch.autograd.grad(o, mine, here.shard(do))]
        for name, x, y in zip(("o", "lse", "dq", "dk", "dv"), got, want, strict=True):
            y = here.shard(y.detach())
            if not (torch.equal(x.isnan(), y.isnan()) and torch.equal(x.nan_to_num(), y.nan_to_num())):
                apart = (x != y) & ~(x.isnan() & y.isnan())
                rows = apart.flatten(1).any(1).nonzero().flatten()
                wrong.append(
                    f"{name} of {lengths}, window {window}, {options}: {apart.sum()} of {apart.numel()} differ, by up to "
                    f"{(x - y).abs().nan_to_num().max()}, in rows {rows[:8].tolist()} of {len(x)}; {here.plan.pieces}"
                )
    assert not wrong, "\n".join(wrong)


def test_the_kernels_of_the_wire_are_the_functions():
    """Bit for bit, with tokens at every end: not finite, zero, without a sign, down to 28 units, out at the largest number."""
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(5000, 3, 128, generator=generator, device="cuda")
    x *= 2.0 ** torch.randint(-140, 127, (5000, 3, 1), generator=generator, device="cuda").double()
    x[::5] *= 28.4 / x[::5].abs().amax(-1, keepdim=True)
    x[1::50], x[2::50, :, 3], x[3::50, 1, 4] = -0.0, torch.nan, torch.inf
    x = x.clamp(-3.38e38, 3.38e38).where(x.isfinite(), x).bfloat16()
    for some in (x, x[..., :64].contiguous()):
        codes, scales = parallel_rows.encoded(some, "e4m3:coarse")
        want = encode_tokens(some, "e4m3:coarse")
        assert torch.equal(codes, want[0]) and torch.equal(scales, want[1])
        rows = torch.randint(0, 5000, (7001,), generator=generator, device="cuda")
        got = parallel_rows.decoded(codes, scales, rows, torch.bfloat16, "e4m3:coarse")
        want = token_values(codes[rows], scales[rows], torch.bfloat16, "e4m3:coarse")
        assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.nan_to_num(), want.nan_to_num())


def failures(ranks: int, backend: str, folder, sizes: tuple[int, ...]) -> str:
    mp.spawn(run, (ranks, backend, str(folder), sizes), nprocs=ranks)
    return "\n".join(path.read_text() for path in sorted(folder.glob("failed-*")))


def test_several_processes_on_one_card(tmp_path):
    found = failures(4, "gloo", tmp_path, (2, 4))
    assert not found, found


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two cards")
def test_two_cards(tmp_path):
    found = failures(2, "nccl", tmp_path, (2,))
    assert not found, found
