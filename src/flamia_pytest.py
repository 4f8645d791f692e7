"""The pytest plugin: one fixture, ``isolated``.

It lives beside the package and not in it, because pytest loads every installed plugin before it collects anything, and
importing the package imports torch. This module imports pytest alone; the auditor is loaded by the first test that asks
for it.

    def test_mine(isolated):
        isolated(my_attention, effort="brief")              # options of flamia.audit, and undecided="fail"
        isolated.model(my_model, effort="brief")            # options of flamia.audit_model
"""

from __future__ import annotations

from typing import Any

import pytest


class Isolated:
    """``flamia.testing.assert_isolated`` as a call, ``assert_model_isolated`` as ``model``."""

    def __call__(self, fn: Any, **options: Any) -> Any:
        __tracebackhide__ = True
        from flamia.testing import assert_isolated

        return assert_isolated(fn, **options)

    def model(self, model: Any, **options: Any) -> Any:
        __tracebackhide__ = True
        from flamia.testing import assert_model_isolated

        return assert_model_isolated(model, **options)


@pytest.fixture(scope="session")
def isolated() -> Isolated:
    """Audit an attention or a model; the test fails with the report if it leaks or if nobody can tell."""
    return Isolated()
