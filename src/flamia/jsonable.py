"""How results are written as JSON, everywhere in this package.

JSON has no infinity and no NaN, and Python's own writer puts words there that other readers refuse. Here they become the
strings "inf", "-inf" and "nan": a ``null`` would say that nothing was measured, and these are measurements. Tuples become
lists, and keys stay what they are.
"""

from __future__ import annotations

import json
import math
from typing import Any


def finite(value: Any) -> Any:
    """``value`` with every float that JSON does not know as a string."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def text(value: Any, indent: int | None = 1) -> str:
    """One JSON document."""
    return json.dumps(finite(value), indent=indent, allow_nan=False)
