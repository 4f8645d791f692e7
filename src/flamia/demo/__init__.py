"""``flamia demo``: everything that can be shown without a GPU, in one page.

Audits every preset and every control, trains a small byte model with three recipes on the same packed text, looks for
the future in that model's predictions on real text, measures each recipe against float64, and writes ``report.html``.
Rooms: ``tasks`` (the pieces of work, each one process with one thread), ``text`` (the probe on real text), ``run`` (who
works when), ``page`` (the report).
"""

from flamia.demo.page import render
from flamia.demo.run import FULL, QUICK, Demo, Size, run

__all__ = ["FULL", "QUICK", "Demo", "Size", "render", "run"]
