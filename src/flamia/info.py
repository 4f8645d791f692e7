"""What this machine is, and which recipe runs on what here, or why not."""

from __future__ import annotations

import importlib
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from flamia import __version__
from flamia.ops import BACKENDS
from flamia.recipe import ROUTES, SAFETIES, UNIFORM_ROUTES, Recipe

HEAD_DIM = 128
"""Kernels depend on the head size; this is the one that is asked about."""


def preset_recipes() -> list[Recipe]:
    """Every preset once; routes without low-bit sums over tokens have one safety."""
    return [
        Recipe.parse(f"{route}/{safety}")
        for route in ROUTES
        for safety in (("strict",) if route in UNIFORM_ROUTES else SAFETIES)
    ]


def versions() -> dict[str, str | None]:
    def installed(name: str) -> str | None:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return None

    return {
        "flamia": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": installed("triton"),
        "cuda": torch.version.cuda,
    }


def processor() -> str:
    """The CPU's name where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def devices() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [
        {"device": "cpu", "name": processor(), "cores": os.cpu_count(), "threads": torch.get_num_threads()}
    ]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append(
            {
                "device": f"cuda:{index}",
                "name": properties.name,
                "capability": f"{properties.major}.{properties.minor}",
                "memory_gib": round(properties.total_memory / 2**30, 1),
            }
        )
    return found


def why_not(backend: str, recipe: Recipe) -> str | None:
    """None where ``backend`` runs ``recipe`` here (causal, bfloat16, head size 128), else the reason."""
    if backend == "reference":
        return None
    if not torch.cuda.is_available():
        return "no CUDA device"
    try:
        kernels = importlib.import_module(BACKENDS[backend])
    except ModuleNotFoundError as error:
        return f"the module {error.name!r} is missing"
    x = torch.empty(0, 1, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    return kernels.supports(x, x, x, recipe, (-1, 0))


def collect() -> dict[str, Any]:
    """Everything ``flamia info`` shows, as plain values."""
    return {
        "versions": versions(),
        "platform": platform.platform(),
        "devices": devices(),
        "recipes": [
            {
                "recipe": str(recipe),
                "claims": sorted(recipe.claims),
                "backends": {backend: why_not(backend, recipe) or "yes" for backend in BACKENDS},
            }
            for recipe in preset_recipes()
        ],
    }
