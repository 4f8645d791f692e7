"""Decoding equals the training forward of the same position, bit for bit: every recipe that promises it, every position."""

import copy
import itertools
import random

import pytest
import torch
from helpers import inputs, offsets, same_bits

import flamia
from flamia import KVCache, Recipe, UnsupportedError, cache, cached, decode
from flamia.recipe import CONTROLS

LENGTHS = (300, 1, 131, 257, 128, 64)
RECIPES = (
    "mxfp8_scores/strict", "mxfp8/strict", "nvfp4_fp8/strict", "nvfp4/strict", "bf16/strict", "mxfp8/fold", "nvfp4/fold",
    "mxfp8/strict,rotate=True", "mxfp8_scores/strict,e_format=bf16,rotate=True", "mxfp8_scores/strict,scale_rule=floor",
    "mxfp8/strict,frontier_block=32,normalizer=rounded", "nvfp4_fp8/strict,u_range=running,lag=0",
    "mxfp8/strict,rounding=False",
)  # fmt: skip


def tensors(lengths=LENGTHS, heads=(4, 2), dim=16, value_dim=None, dtype=torch.bfloat16, seed=0):
    """q, k, v with K and V of changing magnitude, so that scales differ from token to token and group to group."""
    q, k, v, _ = inputs(sum(lengths), heads, dim, value_dim, seed, dtype=dtype)
    size = torch.exp2(torch.randint(-3, 4, (2, sum(lengths), 1, 1), generator=torch.Generator().manual_seed(seed)))
    return q, (k * size[0]).to(dtype), (v * size[1]).to(dtype)


def trained(q, k, v, lengths, recipe, window):
    return flamia.attention_varlen(
        q, k, v, offsets(lengths), causal=True, window=window, recipe=recipe, return_lse=True
    )


class Player:
    """Feeds packed sequences into a cache piece by piece and compares every answer with training's."""

    def __init__(self, recipe, window=None, lengths=LENGTHS, tensors=None, expected=None, **options):
        self.q, self.k, self.v = tensors
        self.lengths, self.starts = lengths, offsets(lengths).tolist()
        self.o, self.lse = expected or trained(*tensors, lengths, recipe, window)
        sizes = (self.k.shape[1], self.k.shape[2])
        self.cache = KVCache(len(lengths), *sizes, value_dim=self.v.shape[2], recipe=recipe, window=window,
                             dtype=self.q.dtype, **options)  # fmt: skip

    @property
    def left(self):
        return [full - now for full, now in zip(self.lengths, self.cache.lengths)]

    def step(self, take, **options):
        take = [min(n, room) for n, room in zip(take, self.left)]
        rows = [torch.arange(s + at, s + at + n) for s, at, n in zip(self.starts, self.cache.lengths, take)]
        rows = torch.cat(rows)
        o, lse = decode(self.q[rows], self.k[rows], self.v[rows], self.cache, offsets(take), return_lse=True, **options)
        assert same_bits(o, self.o[rows]) and same_bits(lse, self.lse[:, rows])

    def play(self, sizes):
        """sizes: a function that gives the next number of tokens of a sequence."""
        while any(self.left):
            self.step([sizes() for _ in self.lengths])


@pytest.mark.parametrize("recipe, heads, window", [
    ("mxfp8_scores/strict", (4, 2), None),
    ("mxfp8_scores/strict", (3, 1), (100, 0)),
    ("mxfp8/strict", (2, 1), None),
    ("nvfp4_fp8/strict", (2, 2), (150, 0)),
])  # fmt: skip
def test_every_position_one_token_at_a_time(recipe, heads, window):
    Player(recipe, window, tensors=tensors(heads=heads)).play(lambda: 1)


@pytest.mark.parametrize("window", [None, (100, 0), (0, 0), (129, 0), (1000, 0)], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_chunks_of_any_size(recipe, window):
    sizes = random.Random(f"{recipe} {window}")
    Player(recipe, window, tensors=tensors()).play(lambda: sizes.choice([0, 1, 5, 31, 64, 130, 200]))


def test_every_length_up_to_300():
    """A document's last position in a call of its own is what decoding gives when it is that long, for each length."""
    lengths = (300,)
    q, k, v = tensors(lengths, heads=(2, 1))
    expected = []
    for n in range(1, 301):
        o, lse = trained(q[:n], k[:n], v[:n], (n,), "mxfp8_scores/strict", None)
        expected.append((o[-1:], lse[:, -1:]))
    o, lse = torch.cat([o for o, _ in expected]), torch.cat([lse for _, lse in expected], 1)
    Player("mxfp8_scores/strict", lengths=lengths, tensors=(q, k, v), expected=(o, lse)).play(lambda: 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("recipe", ["mxfp8_scores/strict", "nvfp4/strict"])
def test_other_head_sizes_and_dtypes(recipe, dtype):
    player = Player(recipe, tensors=tensors(heads=(2, 2), dim=17, value_dim=24, dtype=dtype))
    player.play(itertools.cycle([3, 90, 40]).__next__)


@pytest.mark.parametrize("recipe", ["mxfp8_scores/strict", "mxfp8/strict", "nvfp4/fold"])
@pytest.mark.parametrize("window", [None, (70, 0)], ids=str)
def test_speculation_rolled_back(recipe, window):
    """Guessed tokens go in and are taken back; what follows is as if they had never been there."""
    player, dice = Player(recipe, window, tensors=tensors(), rollback=40), random.Random(1)
    while any(player.left):
        before = player.cache.lengths
        guesses = [dice.randrange(41) for _ in LENGTHS]
        wrong = torch.randn(sum(guesses), 2, 16).bfloat16()
        decode(torch.randn(sum(guesses), 4, 16).bfloat16(), wrong, wrong * 100, player.cache, offsets(guesses))
        player.cache.truncate(before)
        player.step([dice.choice([0, 1, 17, 33]) for _ in LENGTHS])


def test_how_far_back_truncate_goes():
    def filled(recipe, window=None, rollback=0):
        player = Player(recipe, window, (300,), tensors((300,)), rollback=rollback)
        player.play(lambda: 300)
        return player

    codes = filled("mxfp8_scores/strict")
    codes.cache.truncate([3])
    codes.play(lambda: 7)
    blocks = filled("mxfp8/strict")
    blocks.cache.truncate([256])  # a closed block's end: nothing before it is needed in 16 bits
    blocks.play(lambda: 7)
    with pytest.raises(ValueError, match=r"lengths\[0\] = 255: sequence 0 can go back to 256"):
        blocks.cache.truncate([255])
    filled("mxfp8/strict", rollback=45).cache.truncate([255])
    gone = filled("mxfp8_scores/strict", (50, 0))
    with pytest.raises(ValueError, match="can go back to 256"):
        gone.cache.truncate([200])
    for player in (codes, blocks, gone):
        player.cache.truncate([0])
        player.play(lambda: 111)


def test_a_window_bounds_the_cache():
    for recipe in ("mxfp8_scores/strict", "mxfp8/strict", "mxfp8/fold"):
        player = Player(recipe, (100, 0), (900,), tensors((900,)))
        largest = 0
        while player.left != [0]:
            player.step([1 if player.left[0] % 2 else 13])
            largest = max(largest, player.cache.nbytes)
        assert largest <= (100 + 2 * 128) * player.cache.bf16_bytes_per_token


def test_bytes():
    default = KVCache(1, 8, 128)
    assert default.bytes_per_token == 8 * 2 * 129 and default.bf16_bytes_per_token == 8 * 2 * 256
    k = torch.randn(300, 8, 128).bfloat16()
    default.append(k, k, offsets([300]))
    assert default.nbytes == 300 * default.bytes_per_token  # nothing of it in 16 bits, the newest token included
    blocks = KVCache(1, 8, 128, recipe="mxfp8/strict")
    assert blocks.bytes_per_token == 8 * 2 * (128 + 1 / 32)
    blocks.append(k, k, offsets([300]))
    assert blocks.nbytes == 256 * blocks.bytes_per_token + 44 * blocks.bf16_bytes_per_token
    mixed = KVCache(1, 1, 128, recipe="nvfp4_fp8/strict")
    assert mixed.bytes_per_token == 64 + 8 + 1 + 128 + 1 / 32
    assert KVCache(1, 8, 128, recipe="bf16").bytes_per_token == default.bf16_bytes_per_token
    assert KVCache(1, 8, 128, recipe="mxfp8/strict", window=(500, 0)).bytes_per_token == default.bf16_bytes_per_token
    documented = {"mxfp8_scores": 2064, "mxfp8": 2048.5, "nvfp4_fp8": 1608.25}  # docs/decoding.md
    assert {r: KVCache(1, 8, 128, recipe=f"{r}/strict").bytes_per_token for r in documented} == documented
    assert "a token takes 2064 bytes, 4096 in 16 bits" in repr(default)


@pytest.mark.parametrize(
    "recipe", ["mxfp8_scores/strict", "mxfp8/strict", "nvfp4_fp8/strict", "nvfp4/fold", "mxfp8/fold"]
)
@pytest.mark.parametrize("window", [None, (60, 0)], ids=str)
def test_tokens_that_are_not_finite(recipe, window):
    """Rows that see one are NaN, the others keep their bits, and all is as in training."""
    q, k, v = tensors((300, 200))
    k[100, 0, 3], v[130, 1, 0], v[10, 0, 5], k[420, 1, 1] = torch.nan, torch.inf, -torch.inf, torch.inf
    player = Player(recipe, window, (300, 200), (q, k, v))
    assert player.o.isnan().any() and not player.o.isnan().all()
    player.play(itertools.cycle([3, 90, 40]).__next__)


def test_sequences_do_not_meet():
    clean = Player("mxfp8/strict", tensors=tensors())
    clean.play(lambda: 50)
    q, k, v = tensors()
    k[:300], v[:300] = 1e30, torch.nan
    poisoned = Player("mxfp8/strict", tensors=(q, k, v))
    poisoned.play(lambda: 70)
    assert same_bits(clean.o[300:], poisoned.o[300:])


def test_append_then_decode_and_reset():
    player = Player("mxfp8/strict", tensors=tensors())
    for _ in range(2):
        half = [n // 2 for n in LENGTHS]
        rows = torch.cat([torch.arange(s, s + n) for s, n in zip(player.starts, half)])
        player.cache.append(player.k[rows], player.v[rows], offsets(half))
        assert player.cache.lengths == tuple(half)
        player.play(lambda: 29)
        player.cache.reset()
        assert player.cache.nbytes == 0 and player.cache.lengths == (0,) * len(LENGTHS)
    player.play(lambda: 150)
    player.cache.reset([2, 0])
    assert player.cache.lengths == (0, 1, 0, 257, 128, 64)
    player.play(lambda: 41)


def test_one_token_each_needs_no_offsets():
    q, k, v = tensors((1, 1, 1))
    held = KVCache(3, 2, 16)
    assert same_bits(decode(q, k, v, held), trained(q, k, v, (1, 1, 1), None, None)[0])
    assert held.lengths == (1, 1, 1)


def test_no_tokens_at_all():
    held = KVCache(2, 2, 16)
    o = decode(*(torch.zeros(0, h, 16, dtype=torch.bfloat16) for h in (4, 2, 2)), held, offsets([0, 0]))
    assert o.shape == (0, 4, 16) and held.lengths == (0, 0)


def test_a_copy_goes_its_own_way():
    player = Player("mxfp8/strict", tensors=tensors())
    player.step([140] * len(LENGTHS))
    other = copy.deepcopy(player.cache)
    player.play(lambda: 19)
    player.cache = other
    player.play(lambda: 23)


def test_inside_and_outside_of_inference_mode():
    player = Player("mxfp8/strict", tensors=tensors())
    with torch.inference_mode():
        player.step([100] * len(LENGTHS))
    player.step([30] * len(LENGTHS))
    with torch.inference_mode():
        player.play(lambda: 60)


def test_what_fails_changes_nothing():
    for recipe in ("mxfp8_scores/strict", "mxfp8/strict"):
        player = Player(recipe, tensors=tensors())
        player.step([140] * len(LENGTHS))
        before = player.cache.lengths, player.cache.nbytes
        with pytest.raises(UnsupportedError):
            player.step([1] * len(LENGTHS), backend="hopper")
        assert (player.cache.lengths, player.cache.nbytes) == before
        player.play(lambda: 60)


@pytest.mark.parametrize("window", [None, (100, 0)], ids=str)
def test_kernels_read_the_decoded_values(window, monkeypatch):
    """The way that a kernel takes, keys and values decoded to 16 bits and the public function, with the reference in
    its place: decoded values encode to themselves, so the bits are the same."""
    calls = []

    def instead(q, k, v, cu, **options):
        assert options["backend"] == "hopper"
        calls.append(k.dtype)
        return flamia.attention_varlen(q, k, v, cu, **{**options, "backend": "reference"})

    monkeypatch.setattr(cache, "attention_varlen", instead)
    q, k, v = tensors()
    k[100, 0, 3], v[310, 1, 0] = torch.nan, torch.inf
    player = Player("mxfp8_scores/strict", window, tensors=(q, k, v), expected=trained(q, k, v, LENGTHS, None, window))
    while any(player.left):
        player.step([33] * len(LENGTHS), backend="hopper")
    assert set(calls) == {torch.bfloat16}


def test_recipes_that_cannot_be_decoded_are_refused():
    for recipe in (
        "mxfp8/fast",
        "nvfp4/fast",
        *CONTROLS.values(),
        Recipe.strict("mxfp8", cells=(("o_v", "e4m3:token"),)),
    ):
        with pytest.raises(UnsupportedError, match="does not promise 'truncate'"):
            KVCache(1, 1, 16, recipe=recipe)


def test_errors_teach():
    def given(n, **changes):
        return [changes.get(name, torch.zeros(n, h, 16, dtype=torch.bfloat16)) for name, h in zip("qkv", (4, 2, 2))]

    held = KVCache(2, 2, 16)
    for arguments, message in (
        ((*given(3), held), "3 new tokens for 2 sequences"),
        ((*given(3), held, offsets([3])), "must have 3 entries"),
        ((*given(3), held, offsets([1, 1])), "ends at 2, but there are 3"),
        ((*given(3), held, torch.tensor([0, 2, 1], dtype=torch.int32)), "must not decrease"),
        ((*given(2, k=torch.zeros(1, 2, 16, dtype=torch.bfloat16), v=torch.zeros(1, 2, 16, dtype=torch.bfloat16)), held),
         "q has 2 new tokens and k has 1"),
        ((*given(2, v=torch.zeros(2, 2, 8, dtype=torch.bfloat16)), held), r"v must have shape \(new tokens, 2, 16\)"),
        ((*(x.half() for x in given(2)), held), "the cache torch.bfloat16"),
        ((*(x.requires_grad_() for x in given(2)), held), "no gradient"),
        ((*given(2), "cache"), "must be a flamia.KVCache"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            decode(*arguments)
    assert held.lengths == (0, 0)
    for options, message in (
        ({"rollback": -1}, "rollback"), ({"sequences": 0}, "sequences must be"), ({"dtype": torch.float32}, "dtype"),
        ({"head_dim": 300}, "256"), ({"window": 5}, "window"), ({"recipe": "mxfp9"}, "mxfp9"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            KVCache(**{"sequences": 1, "kv_heads": 1, "head_dim": 16, **options})
    with pytest.raises(ValueError, match="can only become shorter"):
        held.truncate([0, 1])
    for lengths in ([0], 0):
        with pytest.raises(ValueError, match="one for each of the 2"):
            held.truncate(lengths)
    for length in (False, 0.0, torch.tensor(0)):
        with pytest.raises(ValueError, match="must be an int"):
            held.truncate([0, length])
    with pytest.raises(ValueError, match="counted from 0"):
        held.reset([2])


@pytest.mark.parametrize("recipe", ["mxfp8_scores/strict", "mxfp8/strict"])
@pytest.mark.parametrize("fails", [2, 3])
def test_memory_that_runs_out_halfway_leaves_the_cache_as_it_was(recipe, fails, monkeypatch):
    """Some operands have the new tokens by then, and some do not."""
    q, k, v = tensors((20,))
    expected, cu = trained(q, k, v, (20,), recipe, None), offsets([10, 0])
    held = KVCache(2, 2, 16, recipe=recipe)
    held.append(k[:10], v[:10], cu)
    calls, add = itertools.count(1), cached.Rows.add

    def short_of_memory(rows, x):
        if next(calls) == fails:
            raise MemoryError
        add(rows, x)

    with monkeypatch.context() as patched, pytest.raises(MemoryError):
        patched.setattr(cached.Rows, "add", short_of_memory)
        held.append(k[10:], v[10:], cu)
    assert held.lengths == (10, 0)
    o, lse = decode(q[10:], k[10:], v[10:], held, cu, return_lse=True)
    assert same_bits(o, expected[0][10:]) and same_bits(lse, expected[1][:, 10:])


@pytest.mark.parametrize("fails", [1, 2, 3, 4])
def test_a_block_that_cannot_be_closed_stays_open(fails, monkeypatch):
    """Closing needs memory for codes and scales of K and V; without it the call is answered all the same, and the block is
    closed by a later one. No bit of any answer shows it."""
    player = Player("mxfp8/strict", tensors=tensors((300,)), lengths=(300,))
    player.step([100])
    calls, add = itertools.count(1), cached.Rows.add
    open_before = [operand.closed_rows for operand in player.cache._stores[0]]

    def short_of_memory(rows, x):
        if x.dtype == torch.uint8 and next(calls) == fails:
            raise torch.OutOfMemoryError("no room for codes")
        add(rows, x)

    with monkeypatch.context() as patched:
        patched.setattr(cached.Rows, "add", short_of_memory)
        player.step([30])  # 130 tokens: the first block of 128 would close
    assert next(calls) > fails
    closed = [operand.closed_rows for operand in player.cache._stores[0]]
    assert open_before == [0, 0] and closed == ([0, 0] if fails <= 2 else [128, 0])
    player.play(lambda: 7)
    assert [operand.closed_rows for operand in player.cache._stores[0]] == [256, 256]
