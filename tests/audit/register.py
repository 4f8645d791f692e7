"""How a fault becomes one of the mutants: it replaces a part of ``parts.Attention`` and is listed under its name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from audit.parts import Attention

from flamia.audit.contract import DEFAULT_CLAIMS

LEFT = 40  # of the mutants with a window


@dataclass(frozen=True)
class Mutant:
    """``make()`` gives a fresh callable, since some keep state; ``options`` go to the audit."""

    name: str
    what: str
    make: Callable[[], Attention]
    options: dict[str, Any] = field(default_factory=dict)


MUTANTS: list[Mutant] = []


def mutant(part: str, *, claims: tuple[str, ...] = (), window: bool = False, **more: Any) -> Callable[[Any], Any]:
    """Register a part of the attention (and ``more`` of them): its name is the mutant's, its docstring what is wrong.
    A class is built anew for every audit, since it remembers.
    """
    options: dict[str, Any] = {"claims": (*sorted(DEFAULT_CLAIMS), *claims)} if claims else {}
    if window:
        options["window"] = (LEFT, 0)

    def register(fn: Any) -> Any:
        def make() -> Attention:
            return Attention(LEFT if window else None, **{part: fn() if isinstance(fn, type) else fn}, **more)

        MUTANTS.append(Mutant(fn.__name__, " ".join(str(fn.__doc__).split()), make, options))
        return fn

    return register
