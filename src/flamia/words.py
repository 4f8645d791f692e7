"""Numbers in sentences, and the word that was meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def amount(number: int, thing: str) -> str:
    """ "1 document", "2,048 documents", "0 ranks"."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def meant(given: object, allowed: Iterable[str]) -> str:
    """ "; did you mean 'lag'?", or nothing where no allowed word is near."""
    near = difflib.get_close_matches(str(given).lower(), list(allowed), n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""
