"""What a command line means by "module:function"."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def load_function(target: str) -> Callable[..., Any]:
    """The object that "module:name" means; modules in the current folder are found too."""
    module, colon, name = target.partition(":")
    if not (module and colon and name):
        raise ValueError(f"target = {target!r}: write it as module:function, for example mypackage.attention:forward")
    if module.endswith(".py"):
        raise ValueError(f"target = {target!r}: a module, not a file: write {module[:-3].replace('/', '.')}:{name}")
    sys.path.insert(0, str(Path.cwd()))
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ValueError(f"target = {target!r}: there is no module {error.name!r} here") from None
    finally:
        sys.path.pop(0)
    for part in name.split("."):
        if not hasattr(found, part):
            raise ValueError(f"target = {target!r}: {module} has no {name!r}")
        found = getattr(found, part)
    if not callable(found):
        raise ValueError(f"target = {target!r}: {name} is a {type(found).__name__}, which cannot be called")
    return found
