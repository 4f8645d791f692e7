"""What every report can do: be written as JSON and as one page. A report brings ``to_dict`` and ``page``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flamia import jsonable
from flamia.console import require


class Written:
    def to_dict(self) -> dict[str, Any]:
        """Plain values, in the schema that the report's module documents."""
        raise NotImplementedError

    def page(self) -> str:
        """HTML."""
        raise NotImplementedError

    def to_json(self, path: str | Path | None = None) -> str:
        """``to_dict`` as text, also written to ``path`` if one is given. Infinity and NaN are strings: "inf", "nan"."""
        text = jsonable.text(self.to_dict())
        if path is not None:
            Path(path).write_text(text + "\n", encoding="utf-8")
        return text

    def to_html(self, path: str | Path | None = None) -> str:
        """One self-contained page with heat maps, also written to ``path`` if one is given. Needs the ``cli`` extra."""
        for name in ("jinja2", "matplotlib"):
            require(name)
        text = self.page()
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text
