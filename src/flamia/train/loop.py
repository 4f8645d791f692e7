"""The training loop: AdamW, warmup and decay, clipping, a log, checkpoints, and the verdict through exact attention.

Everything that decides a number is in ``TrainConfig``; everything that changes while training is in four places (the
weights, AdamW's moments, the stream's position, the step), and a checkpoint holds all four. On a CPU with the same
number of threads 2N steps and N steps, a stop and N steps more give the same bits.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flamia.train import checkpoint
from flamia.train.config import TrainConfig
from flamia.train.data import Corpus, PackedStream
from flamia.train.evaluate import EXACT, Gap, attention_for, gap, losses, mean, validation_batches
from flamia.train.model import Attend, Decoder
from flamia.train.ranks import ALONE, Ranks, place, place_moments, watched

Record = dict[str, Any]
OnStep = Callable[[Record], None]


class Trainer:
    """A model, its optimiser and its place in the data. ``attend`` overrides the recipe's attention (for studies).
    ``ranks``: the processes that share the work (ranks.py)."""

    def __init__(
        self,
        config: TrainConfig,
        corpus: Corpus,
        *,
        device: str | None = None,
        attend: Attend | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        self.config, self.corpus, self.ranks = config, corpus, ranks
        ranks.agree("options or data", f"{config}, data {corpus.fingerprint}")
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.attend = attend or attention_for(config.recipe, config.backend)
        self.model = Decoder(config.shape, config.seed).to(self.device)
        ranks.split(self.model, self.device)
        self.stream = PackedStream(corpus.train, tokens=config.tokens, context=config.context, seed=config.seed)
        self.validation = validation_batches(
            corpus, tokens=config.tokens, context=config.context, count=config.evaluate_batches
        )
        self.optimizer = torch.optim.AdamW(
            self.model.parameter_groups(config.weight_decay),
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
            fused=True,
        )
        self.step = 0

    def advance(self) -> Record:
        """One step: loss and gradient norm are those before the update."""
        rate = self.config.rate(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        batch, predicted = self.ranks.share(self.stream.next(), self.config.shape.width)
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.device.type == "cuda"):
            loss = self.model.loss(batch.to(self.device), self.attend, predicted)
        (loss * self.ranks.count).backward()  # FSDP takes the mean over ranks
        norm = self.ranks.whole(nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip))
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        return {"step": self.step, "loss": self.ranks.total(loss), "gradient_norm": norm.item(), "rate": rate}

    def validate(self) -> float:
        return mean(losses(self.model, self.validation, self.attend, self.ranks))

    def judge(self, exact: Attend | None = None) -> Gap:
        """Validation through the recipe's own attention and through exact attention (bfloat16, no shared scales)."""
        return gap(self.model, self.validation, self.attend, exact or attention_for(EXACT, "reference"), self.ranks)

    def save(self, folder: Path, *, keep: int = 2) -> Path:
        """All ranks must call it; the first one writes."""
        content = {
            "config": self.config.to_dict(),
            "corpus": self.corpus.fingerprint,
            "step": self.step,
            "model": self.ranks.whole(self.model.state_dict()),
            "optimizer": self.ranks.whole(self.optimizer.state_dict()),
            "stream": self.stream.state(),
        }
        path = checkpoint.save(folder, self.step, content, keep=keep) if self.ranks.first else folder
        self.ranks.wait()
        return path

    def restore(self, path: Path) -> None:
        """Continue from ``path``. Recipe, model and data must be those of the checkpoint; the number of steps may not
        differ either, because the learning rate's decay is a function of it."""
        content = checkpoint.load(path)
        saved, mine = content["config"], self.config.to_dict()
        free = {"evaluate_every", "evaluate_batches", "save_every", "backend"}
        for name in mine:
            if name not in free and saved.get(name) != mine[name]:
                raise ValueError(
                    f"{path} was trained with {name} = {saved.get(name)!r}, this run has {mine[name]!r}; "
                    "continue with the same value or start in another folder"
                )
        if content["corpus"] != self.corpus.fingerprint:
            raise ValueError(f"{path} was trained on other data than {self.corpus.source}; give the same --data")
        place(self.model, content["model"])
        place_moments(self.optimizer, content["optimizer"])
        self.stream.restore(content["stream"])
        self.step = content["step"]


@dataclass
class Run:
    """What a finished run leaves: its records (as in log.jsonl), the last gap, seconds spent training."""

    config: TrainConfig
    records: list[Record] = field(default_factory=list)
    gap: Gap | None = None
    seconds: float = 0.0
    parameters: int = 0
    diverged_at: int | None = None

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """Steps and values of one quantity: "loss", "gradient_norm", "validation"."""
        chosen = [(record["step"], record[name]) for record in self.records if name in record]
        return [step for step, _ in chosen], [value for _, value in chosen]

    def summary(self) -> dict[str, Any]:
        trained = [record["loss"] for record in self.records if "loss" in record]
        return {
            "recipe": self.config.recipe,
            "steps": max((record["step"] for record in self.records), default=0),
            "parameters": self.parameters,
            "seconds": round(self.seconds, 2),
            "final_training_loss": mean(trained[-20:]) if trained else None,
            "gap": asdict(self.gap) if self.gap else None,
            "diverged_at": self.diverged_at,
        }


def train(
    config: TrainConfig,
    corpus: Corpus,
    folder: Path | None = None,
    *,
    device: str | None = None,
    resume: bool = False,
    on_step: OnStep | None = None,
    attend: Attend | None = None,
    exact: Attend | None = None,
    ranks: Ranks = ALONE,
) -> Run:
    """Train to ``config.steps``; log to ``folder/log.jsonl``, save to ``folder/step-*.pt``, and judge at the end.

    ``resume`` continues from the newest checkpoint in ``folder``, if there is one; without it the folder is begun anew,
    and the log and checkpoints of an earlier run are removed: a mixture of two runs would be resumed and judged as one.
    A loss that is not finite ends the run and is reported in ``Run.diverged_at``: for a study that is a result.
    ``ranks``: all processes make the same call; the first one writes.
    """
    trainer = Trainer(config, corpus, device=device, attend=attend, ranks=ranks)
    run = Run(config, parameters=trainer.model.size)
    newest = checkpoint.latest(folder) if folder and resume else None
    if folder and newest:
        trainer.restore(newest)
        run.records = [record for record in read_log(folder / "log.jsonl") if record["step"] <= trainer.step]
    elif folder and ranks.first:
        checkpoint.remove_all(folder)
    with watched(ranks, lambda: trainer.step, folder):
        ranks.wait()  # nobody writes before all have read
        with log_to(folder if ranks.first else None, run.records) as write:
            started = time.perf_counter()
            while trainer.step < config.steps:
                record = trainer.advance()
                if not math.isfinite(record["loss"]) or not math.isfinite(record["gradient_norm"]):
                    run.diverged_at = record["step"]
                last = trainer.step == config.steps
                if run.diverged_at is None and (last or due(trainer.step, config.evaluate_every)):
                    record["validation"] = trainer.validate()
                record["seconds"] = round(time.perf_counter() - started, 3)
                run.records.append(record)
                write(record)
                if on_step:
                    on_step(record)
                if run.diverged_at is not None:
                    break
                if folder and (last or due(trainer.step, config.save_every)):
                    trainer.save(folder)
            run.seconds = time.perf_counter() - started
        if run.diverged_at is None:
            run.gap = trainer.judge(exact)
    if folder and ranks.first:
        (folder / "summary.json").write_text(json.dumps(run.summary(), indent=2) + "\n", encoding="utf-8")
    return run


def due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def read_log(path: Path) -> list[Record]:
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]


@contextmanager
def log_to(folder: Path | None, kept: list[Record]) -> Iterator[OnStep]:
    """Yield what writes one record as one line; ``kept`` are the lines of the steps before a resumed checkpoint."""
    if folder is None:
        yield lambda record: None
        return
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "log.jsonl").open("w", encoding="utf-8") as file:

        def write(record: Record) -> None:
            file.write(json.dumps(record) + "\n")
            file.flush()

        for record in kept:
            write(record)
        yield write
