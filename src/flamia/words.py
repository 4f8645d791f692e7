"""Numbers in sentences."""

from __future__ import annotations


def amount(number: int, thing: str) -> str:
    """ "1 document", "2,048 documents", "0 ranks"."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"
