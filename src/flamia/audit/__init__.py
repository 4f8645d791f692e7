"""Prefix isolation of any attention, proved by experiment.

``flamia.audit(fn)`` audits a callable. From ``flamia.audit`` come ``audit_model`` (a whole language model),
``audit_peers`` (other people's attention with all its options; ``known_peers()`` lists them) and ``audit_recipes``
(this library's own presets). The module that you import is therefore also a function: Python looks up ``__call__`` on a
module's *class*, so this module gives itself a class that has one.

Rooms: ``contract`` (what is promised), ``probes`` and ``efforts`` (how inputs are disturbed, and how many), ``targets``
(how a callable is run), ``judge`` (what a difference means), ``diagnose`` (what the leak looks like), ``mass`` (sums),
``controls`` (known leaks), ``report``, ``page`` and ``written`` (what is said about it), ``recipes`` (our own presets),
``models`` (whole language models), ``peers`` (other people's attention) and ``peers_run`` (all of a machine's, in one
command).
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
from .peer_modules import peers as known_peers
from .peer_report import PeerAudit, audit_peers
from .peers import Axes, Options, Peer
from .recipes import RecipeAudit, audit_recipes
from .report import Report

__all__ = [
    "CONTRACTS",
    "DEFAULT_CLAIMS",
    "LEAKY",
    "MODEL_CONTRACTS",
    "Axes",
    "Control",
    "Finding",
    "ModelReport",
    "Options",
    "Packing",
    "Peer",
    "PeerAudit",
    "RecipeAudit",
    "Report",
    "audit_callable",
    "audit_model",
    "audit_peers",
    "audit_recipes",
    "known_peers",
]


class _AuditModule(ModuleType):
    """``flamia.audit`` as a package and as a function."""

    def __call__(self, fn: Callable[..., Any], **options: Any) -> Report:
        return audit_callable(fn, **options)


_AuditModule.__call__.__doc__ = audit_callable.__doc__
sys.modules[__name__].__class__ = _AuditModule
