"""A report on speed: as text, as JSON with every sample, as CSV with a line per figure.

A ratio is a peer's time over ours, taken within each round: above 1 we are faster. Its middle is the median of the
rounds, in brackets are the least and the greatest. Means count eligible peers only.
"""

from __future__ import annotations

import csv
import io
import json
import math
import subprocess
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from flamia.words import amount

from .peers import OURS

PACKAGES = ("triton", "flash-attn-4", "nvidia-cudnn-frontend", "nvidia-cutlass-dsl")
COLUMNS = (
    "workload", "group", "kind", "contender", "eligible", "ms", "tflops", "ratio_low", "ratio", "ratio_high", "how",
    "peak_mb", "mass_o", "mass_dv", "error_o", "error_dq", "error_dk", "error_dv",
)  # fmt: skip


def surroundings(device: str, commit: str | None) -> dict[str, Any]:
    """Machine, versions and commit."""
    cuda = torch.device(device).type == "cuda"
    machine = {"device": torch.cuda.get_device_name() if cuda else device}
    if cuda:
        asked = "driver_version,power.limit,clocks.max.sm"
        said = _said("nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader", "--id=0")
        machine |= dict(zip(asked.split(","), [part.strip() for part in said.split(",")])) if said else {}
    versions: dict[str, str | None] = {"torch": torch.__version__, "cuda": torch.version.cuda}
    versions["cudnn"] = str(torch.backends.cudnn.version()) if cuda and torch.backends.cudnn.is_available() else None
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    here = str(Path(__file__).parent)
    changed = "+changes" if _said("git", "-C", here, "status", "--porcelain", "--untracked-files=no") else ""
    described = commit or (_said("git", "-C", here, "rev-parse", "--short", "HEAD") or "unknown") + changed
    date = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return {"machine": machine, "versions": versions, "commit": described, "date": date}


def _said(*command: str) -> str:
    """What a command prints; nothing if it is not here or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def means(found: dict[str, Any], group: str | None = "packed") -> dict[str, dict[str, dict[str, float]]]:
    """{peer: {kind: {"mean", "least", "workloads"}}}: geometric mean and least of the median ratios of a group."""
    ratios: dict[str, dict[str, list[float]]] = {}
    for row in found["workloads"]:
        if group not in (None, row["group"]):
            continue
        for name, kinds in row["ratios"].items():
            if row["contenders"][name]["eligible"]:
                for kind, (_, middle, _) in kinds.items():
                    ratios.setdefault(name, {}).setdefault(kind, []).append(middle)
    return {
        name: {
            kind: {"mean": math.exp(sum(map(math.log, r)) / len(r)), "least": min(r), "workloads": len(r)}
            for kind, r in kinds.items()
        }
        for name, kinds in ratios.items()
    }


def lines(row: dict[str, Any]) -> str:
    """One workload as text."""
    shape = f"{row['heads']}/{row['kv_heads']} heads of {row['dim']}{'' if row['causal'] else ', not causal'}"
    sizes = f"{amount(row['tokens'], 'token')}, {amount(row['documents'], 'document')}"
    out = [f"{row['name']}   {sizes}, {shape}; {amount(row['rounds'], 'round')}"]
    for name, entry in row["contenders"].items():
        cells = [f"  {name:14s}"]
        for kind in ("forward", "train"):
            figure = entry[kind]
            cells.append(f"{kind} {figure['ms']:8.3f} ms {figure['tflops']:4.0f} TFLOP/s")
            if spread := row["ratios"].get(name, {}).get(kind):
                cells.append(f"{spread[1]:.3f}x [{spread[0]:.3f}, {spread[2]:.3f}]")
        cells.append(f"peak {entry['peak_bytes'] / 1e6:.0f} MB")
        hows = {entry[kind]["how"] for kind in ("forward", "train")} - {"graph"}
        out.append("  ".join([*cells, *sorted(hows)]))
        if not entry["eligible"]:
            out.append(f"    INELIGIBLE: {'; '.join(entry['check']['faults'])}")
    out += [f"  {name:14s}not here: {reason}" for name, reason in row["refused"].items()]
    return "\n".join(out)


def text(found: dict[str, Any]) -> str:
    machine = ", ".join(map(str, found["machine"].values()))
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items() if version)
    out = [f"{machine}; {versions}; commit {found['commit']}; {found['date']}; {found['seconds']:.0f} s", ""]
    out += [lines(row) for row in found["workloads"]]
    if found["not_run"]:
        out.append(f"no time for: {', '.join(found['not_run'])}")
    out.append("")
    inside: dict[str, str] = {}
    for row in found["workloads"]:
        inside |= {name: entry["inside"] for name, entry in row["contenders"].items()}
    out += [f"{name} is timed with: {what}" for name, what in inside.items()]
    for name, kinds in means(found).items():
        for kind, m in kinds.items():
            out.append(
                f"{kind} against {name} on {m['workloads']} packed workloads: geometric mean {m['mean']:.3f}x, "
                f"least {m['least']:.3f}x"
            )
    return "\n".join(out)


def table(found: dict[str, Any]) -> str:
    """The CSV."""
    stream = io.StringIO()
    out = csv.writer(stream, lineterminator="\n")
    out.writerow(COLUMNS)
    for row in found["workloads"]:
        for name, entry in row["contenders"].items():
            check = entry["check"]
            for kind in ("forward", "train"):
                figure = entry[kind]
                own = [1.0, 1.0, 1.0] if name == OURS else ["", "", ""]
                spread = row["ratios"].get(name, {}).get(kind, own)
                out.writerow(
                    [row["name"], row["group"], kind, name, entry["eligible"], figure["ms"], figure["tflops"], *spread,
                     figure["how"], entry["peak_bytes"] / 1e6, check["mass_o"], check["mass_dv"],
                     *check["errors"].values()]
                )  # fmt: skip
    return stream.getvalue()


def write(found: dict[str, Any], out: Path) -> list[Path]:
    """OUT.json, OUT.csv, and OUT.png where matplotlib is installed."""
    out.parent.mkdir(parents=True, exist_ok=True)
    paths = [out.with_name(out.name + ".json"), out.with_name(out.name + ".csv")]
    paths[0].write_text(json.dumps(found | {"means": means(found)}, indent=1), encoding="utf-8")
    paths[1].write_text(table(found), encoding="utf-8")
    try:
        paths.append(plot(found, out.with_name(out.name + ".png")))
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
    return paths


def plot(found: dict[str, Any], path: Path) -> Path:
    from .plots import speed

    speed(found).savefig(path, dpi=160)
    return path
