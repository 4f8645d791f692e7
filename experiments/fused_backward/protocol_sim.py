"""Random interleavings of the barrier protocol of fused4.py (v4: U^T in one buffer, Q in three, dQ staged once): no deadlock, and
every buffer holds what its reader expects. Actors are generators; a yield is a point where any other actor may run."""
import random, sys
class Bar:
    def __init__(s, n): s.n = n; s.c = n; s.ph = 0
    def arrive(s):
        s.c -= 1; assert s.c >= 0, "too many arrivals"
        if s.c == 0: s.c = s.n; s.ph += 1
    def done(s, parity): return (s.ph & 1) != parity   # waits for the phase of this parity
def wait(b, parity):
    while not b.done(parity): yield "blocked"
R = 4
def cta(sh):
    full = [Bar(1) for _ in range(2)]; made = [Bar(2) for _ in range(2)]; turn = [Bar(1) for _ in range(R)]; done = [Bar(1) for _ in range(R)]
    sent, stage_free, kvf, kve = Bar(2), Bar(1), Bar(1), Bar(4)
    codes, gb, qb, us, stage, slot = [None] * 2, [None] * 2, [None] * 3, [None] * 2, [None] * 2, [None]
    def producer():
        i = tile = 0
        while True:
            yield
            t = sh["next"]; sh["next"] += 1
            if t >= len(sh["items"]): break
            yield from wait(kve, (tile & 1) ^ 1); slot[0] = sh["items"][t]; yield; kvf.arrive(); tile += 1
            n, first, end = slot[0]
            for m in range(first, end):
                yield from wait(made[i & 1], ((i >> 1) & 1) ^ 1)
                yield; codes[i & 1] = i; yield; gb[i & 1] = i; qb[i % 3] = i; yield; full[i & 1].arrive(); i += 1
        yield from wait(kve, (tile & 1) ^ 1); slot[0] = None; kvf.arrive()
    def consumer(c):
        i = tile = 0
        def send(j):
            yield from wait(stage_free, (j & 1) ^ 1); yield; stage[c] = j; yield; sent.arrive()
        def dq(j):
            yield from wait(made[j & 1], (j >> 1) & 1)
            for _ in range(3): assert us == [j, j], (us, j); yield
        yield from wait(kvf, 0)
        while slot[0] is not None:
            n, first, end = slot[0]
            for m in range(first, end):
                yield from wait(full[i & 1], (i >> 1) & 1)
                assert codes[i & 1] == i; yield
                if m > first:
                    assert qb[(i - 1) % 3] == i - 1
                    yield from dq(i - 1); assert qb[(i - 1) % 3] == i - 1; yield from send(i - 1)
                yield; assert gb[i & 1] == i and codes[i & 1] == i
                yield from wait(sent, (i - 1) & 1)
                us[c] = i; yield; assert gb[i & 1] == i; made[i & 1].arrive(); i += 1
            if end > first: yield from dq(i - 1); assert qb[(i - 1) % 3] == i - 1; yield from send(i - 1)
            kve.arrive(); tile += 1; yield from wait(kvf, tile & 1)
    def helper(scout):
        i = tile = 0
        yield from wait(kvf, 0)
        while slot[0] is not None:
            n, first, end = slot[0]; kve.arrive(); yield
            for m in range(first, end):
                want = m // 2 - n; s = i % R
                if scout:
                    while sh["turns"][m] < want: yield "blocked"
                    yield from wait(done[s], ((i // R) & 1) ^ 1); yield; turn[s].arrive()
                else:
                    yield from wait(turn[s], (i // R) & 1); yield from wait(sent, i & 1)
                    for _ in range(2): assert stage == [i, i], (stage, i); yield
                    stage_free.arrive(); yield
                    assert sh["turns"][m] == want; sh["turns"][m] += 1; done[s].arrive()
                i += 1
            tile += 1; yield from wait(kvf, tile & 1)
    return [producer(), consumer(0), consumer(1), helper(True), helper(False)]
for seed in range(int(sys.argv[1])):
    rng = random.Random(seed); nb = rng.randint(1, 7); steps = 2 * nb
    sh = dict(next=0, items=[(n, 2 * n, steps) for n in reversed(range(nb))], turns=[0] * steps)
    actors = [a for _ in range(rng.randint(1, 5)) for a in cta(sh)]
    weight = [rng.choice([1, 1, 5, 50]) for _ in actors]; idle = 0
    while actors:
        k = rng.choices(range(len(actors)), weight)[0]
        try: r = next(actors[k]); idle = idle + 1 if r == "blocked" else 0
        except StopIteration: del actors[k], weight[k]; idle = 0
        assert idle < 20000, ("deadlock", seed)
    assert sh["turns"] == [m // 2 + 1 for m in range(steps)]
print("ok")
