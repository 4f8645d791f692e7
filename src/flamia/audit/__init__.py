"""Prefix isolation of any attention, proved by experiment.

``flamia.audit(fn)`` audits a callable; ``from flamia.audit import audit_recipes`` audits this library's own
presets. The module that you import is therefore also a function: Python looks up ``__call__`` on a module's
*class*, so this module gives itself a class that has one. Rooms: ``contract`` (what is promised), ``probes`` (how
inputs are disturbed), ``targets`` (how a callable is run), ``judge`` (what a difference means), ``diagnose`` (what
the leak looks like), ``mass`` (sums), ``controls`` (known leaks), ``report`` and ``page`` (what is said about it),
``recipes`` (our own presets), ``models`` (whole language models).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from .auditor import audit_callable
from .contract import CONTRACTS, DEFAULT_CLAIMS, Packing
from .controls import LEAKY, Control
from .judge import Finding
from .model_report import MODEL_CONTRACTS, ModelReport
from .models import audit_model
from .recipes import RecipeAudit, audit_recipes
from .report import Report

__all__ = [
    "CONTRACTS",
    "DEFAULT_CLAIMS",
    "LEAKY",
    "MODEL_CONTRACTS",
    "Control",
    "Finding",
    "ModelReport",
    "Packing",
    "RecipeAudit",
    "Report",
    "audit_callable",
    "audit_model",
    "audit_recipes",
]


class _AuditModule(ModuleType):
    """``flamia.audit`` as a package and as a function."""

    def __call__(self, fn: Callable[..., Any], **options: Any) -> Report:
        return audit_callable(fn, **options)


_AuditModule.__call__.__doc__ = audit_callable.__doc__
sys.modules[__name__].__class__ = _AuditModule
