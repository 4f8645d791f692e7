"""The helper for test suites, and the pytest plugin: loaded everywhere, so it must be light and must never be in the way."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flamia_pytest
from flamia.audit.controls import attend, block_scaled
from flamia.testing import UndecidedWarning, assert_isolated, assert_model_isolated

ROOT = Path(__file__).parents[1]
SMALL = {"effort": "spot", "heads": (2, 1), "head_dim": 16, "lengths": (13, 75, 0, 1, 21)}


def noisy(q, k, v, cu):
    return attend(q, k, v, cu) * (1 + 0.01 * torch.rand(()))


def test_a_clean_attention_passes_and_gives_its_report():
    assert assert_isolated(attend, **SMALL).verdict == "clean"


@pytest.mark.parametrize("undecided", ["fail", "warn", "pass"])
def test_a_leak_fails_with_the_report_whatever_is_said_about_undecided(undecided):
    with pytest.raises(AssertionError) as said:
        assert_isolated(block_scaled("v", 32), name="mine", undecided=undecided, **SMALL)
    text = str(said.value)
    assert text.startswith("mine: LEAK") and "prefix: O moved" in text and "groups of 32" in text


def test_undecided_fails_unless_it_is_accepted():
    with pytest.raises(AssertionError, match="not repeatable"):
        assert_isolated(noisy, **SMALL)
    with pytest.warns(UndecidedWarning, match="noisy: UNDECIDED"):
        assert assert_isolated(noisy, undecided="warn", **SMALL).exit_code == 2
    assert assert_isolated(noisy, undecided="pass", **SMALL).verdict == "undecided"
    with pytest.raises(ValueError, match="'fail', 'warn' or 'pass'"):
        assert_isolated(attend, undecided="ignore")


def test_models_have_their_own():
    table = torch.randn(40, 40)
    assert assert_model_isolated(lambda t: table[t].cumsum(1), effort="spot").verdict == "clean"
    with pytest.raises(AssertionError, match="prefix: logits moved"):
        assert_model_isolated(lambda t: table[t] + table[t].mean(1, keepdim=True), effort="spot")


SUITE = """
import torch
from flamia.audit.controls import attend, block_scaled

SMALL = {"effort": "spot", "heads": (2, 1), "head_dim": 16, "lengths": (13, 75, 0, 1, 21)}

def test_sound(isolated):
    assert isolated(attend, **SMALL).exit_code == 0

def test_leaky(isolated):
    isolated(block_scaled("v", 32), **SMALL)

def test_model(isolated):
    table = torch.randn(40, 40)
    isolated.model(lambda tokens: table[tokens].cumsum(1), effort="spot")
"""


def run(folder, code, *arguments):
    """pytest of its own in ``folder``, with the plugin named: an entry point counts for installed packages only."""
    (folder / "test_mine.py").write_text(code)
    command = [sys.executable, "-m", "pytest", "-p", "flamia_pytest", "-p", "no:cacheprovider", "-q", *arguments]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(folder)])}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


def test_the_fixture_needs_no_import_and_shows_the_report(tmp_path):
    done = run(tmp_path, SUITE)
    assert "2 passed" in done.stdout and "1 failed" in done.stdout and done.returncode == 1, done.stdout + done.stderr
    assert "prefix: O moved" in done.stdout and "def _judged" not in done.stdout


def test_the_plugin_is_light_and_in_nobodys_way(tmp_path):
    """A suite that does not ask for the fixture pays for no torch, and is collected where torch cannot be imported."""
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')\n")
    light = "import sys\ndef test_light():\n    assert not {'torch', 'flamia', 'typer', 'rich'} & set(sys.modules)\n"
    done = run(tmp_path, light)
    assert "1 passed" in done.stdout and done.returncode == 0, done.stdout + done.stderr
    done = run(tmp_path, "def test_wants(isolated):\n    isolated(len)\n")
    assert "no torch here" in done.stdout and "1 failed" in done.stdout  # the test that needs it, not the collection


def test_the_plugin_is_registered():
    project = (ROOT / "pyproject.toml").read_text()
    # The entry point has the module's own name, so that naming it with -p as well does not register it twice.
    assert '[project.entry-points.pytest11]\nflamia_pytest = "flamia_pytest"' in project
    assert 'py-modules = ["flamia_pytest"]' in project and callable(flamia_pytest.Isolated())


def test_the_workflow_is_yaml_and_its_commands_exist():
    yaml, typer = pytest.importorskip("yaml"), pytest.importorskip("typer")
    from flamia.cli import app

    steps = yaml.safe_load((ROOT / "examples" / "github-actions.yml").read_text())["jobs"]["audit"]["steps"]
    lines = [line for step in steps for line in step.get("run", "").splitlines() if line.startswith("flamia ")]
    assert len(lines) == 2
    for line in lines:
        command, *arguments = shlex.split(line.partition(" > ")[0])[1:]
        typer.main.get_command(app).commands[command].make_context(command, arguments)  # refuses unknown options
