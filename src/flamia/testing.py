"""For test suites: an attention, or a model, that is not isolated fails a test with the auditor's report.

    from flamia.testing import assert_isolated, assert_model_isolated

    def test_mine():
        assert_isolated(my_attention, effort="brief")

With pytest there is also the fixture ``isolated``, which needs no import (see ``flamia_pytest``).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flamia.audit import ModelReport, Report

__all__ = ["UndecidedWarning", "assert_isolated", "assert_model_isolated"]


class UndecidedWarning(UserWarning):
    """An audit could not judge, and was told to let that pass."""


def assert_isolated(fn: Callable[..., Any], *, undecided: str = "fail", **options: Any) -> Report:
    """Audit an attention and raise ``AssertionError``, with the report as its text, unless it is clean.

    ``undecided`` says what happens when the audit cannot judge (the callable does not repeat itself, a length decides
    last bits, something claimed could not be tried): "fail" by default, since what nobody can vouch for is not
    isolated; "warn" or "pass" where that is known and accepted. A leak always fails. All other options are those of
    ``flamia.audit``. Returns the report.
    """
    from flamia.audit import audit_callable

    return _judged(undecided, audit_callable, fn, options)


def assert_model_isolated(model: Callable[..., Any], *, undecided: str = "fail", **options: Any) -> ModelReport:
    """The same for a causal language model; options are those of ``flamia.audit_model``. Skew fails as a leak does."""
    from flamia.audit import audit_model

    return _judged(undecided, audit_model, model, options)


def _judged(undecided: str, audit: Callable[..., Any], target: Callable[..., Any], options: dict[str, Any]) -> Any:
    __tracebackhide__ = True
    if undecided not in ("fail", "warn", "pass"):
        raise ValueError(f"undecided={undecided!r}: 'fail', 'warn' or 'pass'; a leak fails in any case")
    report = audit(target, **options)
    if report.exit_code == 1 or (report.exit_code == 2 and undecided == "fail"):
        raise AssertionError(str(report))
    if report.exit_code == 2 and undecided == "warn":
        warnings.warn(str(report), UndecidedWarning, stacklevel=3)
    return report
