"""One run: a model trained to the end, judged, and told as plain values.

On a card the whole step (forward, backward, clipping, AdamW) is one CUDA graph, captured after a few ordinary steps,
which are the first of the run: launching the reference's thousands of small operations would take longer than they do.
Where a graph cannot be had the same step runs without one, and the result says so. Losses and norms stay on the device
until they are looked at, every `LOOK` steps; a loss that is not finite ends the run and is a result.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flamia.study.attention import Arithmetic, dense, folded
from flamia.study.plan import EXACT, TORCH, Run, Settings
from flamia.study.text import Text, batches, targets
from flamia.train.config import TrainConfig
from flamia.train.data import IGNORED, Batch
from flamia.train.evaluate import attention_for
from flamia.train.model import Attend, Decoder

EAGER_STEPS, TIMED_STEPS, LOOK = 3, 5, 50
AT_ONCE = 32
"""Documents in one forward where nothing is trained."""
SHORTEST = EAGER_STEPS + TIMED_STEPS
Say = Callable[[str], None]


class OutOfTime(Exception):
    """A run that would not end before its deadline; the words say how long it would take."""


def attention_of(run: Run, length: int) -> Attend:
    if run.attention == TORCH:
        return dense(length, run.arithmetic.sink)
    if run.attention == "kernels":
        return attention_for(str(run.arithmetic.forward))
    return folded(run.arithmetic, length)


def batch_of(pieces: Tensor, device: torch.device) -> Batch:
    """Documents (count, length) uint8 as a packed batch."""
    count, length = pieces.shape
    offsets = torch.arange(count + 1, dtype=torch.int32) * length
    positions = torch.arange(length).repeat(count)
    batch = Batch(pieces.long().flatten(), targets(pieces).flatten(), positions, offsets, (length,) * count)
    return batch.to(device)


class Engine:
    """A model with its optimiser and a batch whose memory stays where it is."""

    def __init__(self, run: Run, settings: Settings, text: Text, device: torch.device) -> None:
        self.run, self.settings, self.device = run, settings, device
        length = settings.length
        self.attend = attention_of(run, length)
        self.exact = folded(Arithmetic.of(EXACT, sink=run.arithmetic.sink), length)
        self.model = Decoder(settings.shape, run.seed).to(device)
        self.schedule = TrainConfig(
            settings.shape, learning_rate=settings.learning_rate, final_rate=settings.final_rate, warmup=settings.warmup,
            steps=settings.steps,
        )  # fmt: skip
        on_card = device.type == "cuda"
        self.optimizer = torch.optim.AdamW(
            self.model.parameter_groups(settings.weight_decay),
            lr=torch.tensor(0.0, device=device), betas=(0.9, 0.95), fused=True, capturable=on_card,
        )  # fmt: skip
        drawn = batches(text.train, settings.documents, settings.steps)
        self.train, self.train_targets = (x.flatten(1).to(device) for x in (drawn, targets(drawn)))
        self.held_out = text.held_out[: settings.final_documents]
        self.batch = batch_of(torch.zeros(settings.documents, length, dtype=torch.uint8), device)
        self.found = torch.zeros(2, device=device)
        self.history = torch.full((settings.steps, 2), math.nan, device=device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.stream = torch.cuda.Stream() if on_card else None
        self.why_no_graph = None if on_card else "no card"

    # ------------------------------------------------------------------------------------------------------- training

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.device.type == "cuda")

    def body(self) -> None:
        """What a step does on the device; loss and norm, before the update, are left in `found`."""
        self.optimizer.zero_grad(set_to_none=True)
        with self.autocast():
            loss = self.model.loss(self.batch, self.attend)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip)
        self.optimizer.step()
        self.found.copy_(torch.stack([loss.detach().float(), norm.detach().float()]))

    def place(self, step: int) -> None:
        self.batch.tokens.copy_(self.train[step])
        self.batch.targets.copy_(self.train_targets[step])
        for group in self.optimizer.param_groups:
            group["lr"].fill_(self.schedule.rate(step))

    def advance(self, step: int) -> None:
        self.place(step)
        if self.graph is not None:
            self.graph.replay()
        else:
            self.body()
        self.history[step].copy_(self.found)

    def capture(self) -> None:
        """Put `body` into a graph, on the stream on which the first steps ran."""
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=self.stream):
                self.body()
        except Exception as error:  # whatever cannot be captured runs as it is
            self.why_no_graph = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            torch.cuda.synchronize()
            return
        self.graph = graph

    def first_steps(self) -> None:
        if self.stream is None:
            for step in range(EAGER_STEPS):
                self.advance(step)
            return
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for step in range(EAGER_STEPS):
                self.advance(step)
        torch.cuda.current_stream().wait_stream(self.stream)
        torch.cuda.synchronize()
        self.capture()

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    # -------------------------------------------------------------------------------------------------------- judging

    @torch.no_grad()
    def losses(self, attend: Attend, documents: int) -> list[float]:
        """Mean loss of each of the first held-out documents, nats per byte."""
        found = []
        with self.autocast():
            for pieces in self.held_out[:documents].split(AT_ONCE):
                batch = batch_of(pieces, self.device)
                logits = self.model(batch, attend).float()
                each = F.cross_entropy(logits, batch.targets, ignore_index=IGNORED, reduction="none")
                found.append(each.view(pieces.shape).sum(1, dtype=torch.float64) / (pieces.shape[1] - 1))
        return [round(x, 5) for x in torch.cat(found).tolist()]

    def diagnose(self) -> list[dict[str, float]]:
        """What rounding does to U in each layer, first layer first, on one held-out batch."""
        arithmetic = self.run.arithmetic
        seen: list[dict[str, Any]] = []
        watched = folded(arithmetic, self.settings.length, seen)
        with self.autocast():
            loss = self.model.loss(batch_of(self.held_out[: self.settings.documents], self.device), watched)
        torch.autograd.grad(loss, [self.model.embedding.weight])
        return [_told(layer) for layer in reversed(seen)]


def _told(layer: dict[str, Any]) -> dict[str, float]:
    def size(name: str) -> float:
        return layer[name].square().mean().sqrt().item()

    rows = ("row_residual", "row_residual_rounded", "mean_error", "mass_error")
    told = {name: size(name) for name in rows} | {"row_residual_mean": layer["row_residual"].mean().item()}
    shares = ("u_zeroed_dq", "u_zeroed_dk", "p_zeroed", "u_saturated")
    return {name: float(f"{x:.4g}") for name, x in (told | {name: layer[name] for name in shares}).items()}


def execute(
    run: Run, settings: Settings, text: Text, device: torch.device, deadline: float, say: Say
) -> tuple[dict[str, Any], Engine]:
    """The result of a run, and the engine with the finished model. deadline: of `time.monotonic`. Raises OutOfTime."""
    begun = time.monotonic()
    engine = Engine(run, settings, text, device)
    engine.first_steps()
    engine.wait()
    ready = time.monotonic()
    for step in range(EAGER_STEPS, SHORTEST):
        engine.advance(step)
    engine.wait()
    each = (time.monotonic() - ready) / TIMED_STEPS
    needed = 1.15 * each * (settings.steps - SHORTEST)
    say(f"{run.name}: ready after {ready - begun:.1f} s, {1e3 * each:.1f} ms a step" + (
        f", no graph ({engine.why_no_graph})" if engine.why_no_graph else ""
    ))  # fmt: skip
    if time.monotonic() + needed > deadline:
        graph = f"no graph ({engine.why_no_graph})" if engine.why_no_graph else "in a graph"
        raise OutOfTime(f"{needed:.0f} s more at {1e3 * each:.1f} ms a step, {graph}")
    result: dict[str, Any] = {"name": run.name, "attention": run.attention, "arithmetic": str(run.arithmetic)}
    result |= {"seed": run.seed, "control": run.control, "parameters": engine.model.size, "diverged_at": None}
    result |= {"validation": [], "diagnostics": []}

    def look(done: int) -> None:
        if settings.diagnose_every and done % settings.diagnose_every == 0:
            result["diagnostics"].append({"step": done, "layers": engine.diagnose()})
        if settings.evaluate_every and done % settings.evaluate_every == 0:
            pair = [engine.losses(attend, settings.evaluate_documents) for attend in (engine.attend, engine.exact)]
            own, exact = (math.fsum(losses) / len(losses) for losses in pair)
            result["validation"].append({"step": done, "own": round(own, 6), "exact": round(exact, 6)})

    for done in range(SHORTEST + 1, settings.steps + 1):
        engine.advance(done - 1)
        if done % LOOK == 0 or done == settings.steps:
            bad = (~engine.history[:done].isfinite()).any(1)
            if bad.any().item():
                result["diverged_at"] = int(bad.nonzero()[0].item()) + 1
                break
            look(done)
    engine.wait()
    result["seconds"] = round(time.monotonic() - begun, 2)
    result["step_ms"], result["graph"] = round(1e3 * each, 2), engine.why_no_graph or "yes"
    kept = engine.history[: result["diverged_at"] or settings.steps].tolist()
    result["loss"], result["gradient_norm"] = ([float(f"{row[i]:.5g}") for row in kept] for i in (0, 1))
    if result["diverged_at"] is None:
        judge(result, engine)
    return result, engine


def judge(result: dict[str, Any], engine: Engine) -> None:
    """Losses of the finished model, document by document, through its own attention, the exact one, and others."""
    count, run, length = engine.settings.final_documents, engine.run, engine.settings.length
    result["own"] = engine.losses(engine.attend, count)
    result["exact"] = engine.losses(engine.exact, count)
    result["through"] = {recipe: engine.losses(folded(Arithmetic.of(recipe), length), count) for recipe in run.through}


@torch.enable_grad()
def activations(engine: Engine, layers: tuple[int, ...], heads: tuple[int, ...], documents: int) -> dict[str, Any]:
    """q, k, v and dO of some layers and heads of a finished model on held-out text, bfloat16, and their offsets."""
    length, kept, count = engine.settings.length, {}, 0
    rows = slice(0, documents * length)

    def part(x: Tensor) -> Tensor:
        return x.detach()[rows][:, list(heads)].to("cpu", torch.bfloat16).contiguous()

    def attend(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Tensor:
        nonlocal count
        layer, count = count, count + 1
        o = engine.attend(q, k, v, cu_seqlens)
        if layer in layers:
            kept[layer] = {"q": part(q), "k": part(k), "v": part(v)}
            o.register_hook(lambda g: kept[layer].update(do=part(g)))
        return o

    with engine.autocast():
        loss = engine.model.loss(batch_of(engine.held_out[: engine.settings.documents], engine.device), attend)
    torch.autograd.grad(loss, [engine.model.embedding.weight])
    offsets = torch.arange(documents + 1, dtype=torch.int32) * length
    return {"layers": kept, "cu_seqlens": offsets, "heads": heads}
