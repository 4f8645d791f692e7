"""The command line: exit codes, one JSON document on standard output, refusals in one line, bugs with their traceback."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer")

from flamia import cli, console

SOURCE = Path(cli.__file__).parents[1]


@pytest.fixture
def flamia(monkeypatch, capsys):
    """Run ``flamia ARGUMENTS`` in this process: (exit code, standard output, standard error)."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["flamia", *map(str, arguments)])
        with pytest.raises(SystemExit) as left:
            cli.main()
        said = capsys.readouterr()
        return left.value.code or 0, said.out, said.err

    return run


@pytest.fixture
def text(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    for index in range(30):
        (folder / f"{index:02}.txt").write_text(f"file {index}: the query reads the key and the value answers. " * 12)
    return folder


def python(*arguments: str, code: str | None = None) -> subprocess.CompletedProcess:
    command = [sys.executable, *(["-c", code] if code else []), *arguments]
    environment = os.environ | {"PYTHONPATH": str(SOURCE), "COLUMNS": "80"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)


# ------------------------------------------------------------------------------------------------------------- info


def test_info_says_which_recipe_runs_where_and_why_not(flamia):
    code, out, err = flamia("info", "--json")
    facts = json.loads(out)
    assert code == 0 and err == "" and facts["versions"]["torch"] and facts["devices"][0]["device"] == "cpu"
    rows = {row["recipe"]: row for row in facts["recipes"]}
    assert {"mxfp8/strict", "mxfp8/fast", "nvfp4/fold", "bf16/strict", "mxfp8_scores/strict"} <= set(rows)
    assert "mask" in rows["mxfp8/strict"]["claims"] and "prefix" not in rows["mxfp8/fast"]["claims"]
    assert all(row["backends"]["reference"] == "yes" for row in rows.values())
    code, out, _ = flamia("info")
    assert code == 0 and "mxfp8/strict" in out and "torch" in out


def test_python_dash_m_is_the_same_command_and_its_output_is_json_alone():
    done = python("-m", "flamia", "info", "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["versions"]["flamia"]


# --------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["train", "--decay", "step"], "decay = 'step'"),
        (["train", "--recipe", "mxfp9"], "mxfp9"),
        (["train", "--data", "/nowhere"], "data: /nowhere"),
        (["evaluate", "/nowhere/step-1.pt"], "checkpoint: /nowhere/step-1.pt does not exist"),
        (["accuracy", "--inputs", "uniform"], "'uniform'"),
        (["audit", "no_colon"], "module:function"),
        (["audit", "no_such_module:fn"], "no module 'no_such_module'"),
        (["audit", "math:nothing"], "has no 'nothing'"),
        (["audit", "math:pi"], "float, which cannot be called"),
    ],
)
def test_what_flamia_refuses_is_one_line_and_exit_code_two(flamia, arguments, reason):
    code, out, err = flamia(*arguments, "--json")
    assert code == 2 and out == ""
    assert err.startswith("flamia: ") and err.count("\n") == 1 and reason in err


def test_a_bug_keeps_its_traceback(flamia, monkeypatch):
    def broken():
        raise ValueError("raised by somebody else's code")

    monkeypatch.setattr("flamia.info.collect", broken)
    monkeypatch.setattr(sys, "argv", ["flamia", "info"])
    with pytest.raises(ValueError, match="somebody else"):
        cli.main()


def test_a_missing_extra_says_what_to_install(flamia, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    code, out, err = flamia("demo", "--out", tmp_path)
    assert code == 2 and out == "" and "jinja2" in err and "pip install 'flamia[cli]'" in err


def test_without_typer_the_command_says_what_to_install():
    done = python("-m", "flamia", code="import sys; sys.modules['typer'] = None; import flamia.cli")
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr == "flamia: the command line needs typer: pip install 'flamia[cli]'\n"


def test_numbers_that_json_does_not_know_become_strings(capsys):
    cli.emit({"a": [1.5, float("nan"), None], "b": (float("-inf"),), "c": {"d": float("inf")}})
    said = capsys.readouterr().out
    assert json.loads(said, parse_constant=pytest.fail) == {"a": [1.5, "nan", None], "b": ["-inf"], "c": {"d": "inf"}}


# ------------------------------------------------------------------------------------------------------------ audit


@pytest.mark.parametrize(
    ("name", "expected", "verdict"), [("sound", 0, "clean"), ("leaky", 1, "leak"), ("noisy", 2, "undecided")]
)
def test_the_exit_code_of_an_audit_is_its_verdict(flamia, monkeypatch, tmp_path, name, expected, verdict):
    (tmp_path / "someones_attention.py").write_text(
        "import torch, flamia\n"
        "def sound(q, k, v, cu):\n    return flamia.attention_varlen(q, k, v, cu, causal=True, recipe='bf16')\n"
        "def leaky(q, k, v, cu):\n    return flamia.attention_varlen(q, k, v, cu, causal=False, recipe='bf16')\n"
        "def noisy(q, k, v, cu):\n    return sound(q, k, v, cu) * (1 + 0.1 * torch.rand(()))\n"
    )
    monkeypatch.chdir(tmp_path)
    page = tmp_path / "pages" / "audit.html"
    options = ["--effort", "spot", "--head-dim", 16, "--heads", 2, "--kv-heads", 1, "--html", page]
    code, out, _ = flamia("audit", f"someones_attention:{name}", *options, "--json")
    assert code == expected and json.loads(out)["verdict"] == verdict
    assert verdict in page.read_text()


def test_what_a_function_is_asked_with_reaches_it(flamia, monkeypatch, tmp_path):
    (tmp_path / "windowed_attention.py").write_text(
        "import torch, flamia\n"
        "def windowed(q, k, v, cu_q, cu_k):\n"
        "    assert q.dtype == torch.float16\n"
        "    return flamia.attention_varlen(q, k, v, cu_q, cu_seqlens_k=cu_k, causal=True, window=(40, 0), return_lse=True)\n"
    )
    monkeypatch.chdir(tmp_path)
    asked = (
        "--effort",
        "spot",
        "--head-dim",
        16,
        "--dtype",
        "fp16",
        "--cross",
        "--seed",
        3,
        "--claim",
        "mask",
        "--json",
    )
    code, out, _ = flamia("audit", "windowed_attention:windowed", "--window", 40, 0, *asked)
    found = json.loads(out)
    told = {"dtype": "float16", "cross": True, "window": [40, 0], "seed": 3, "effort": "spot"}
    assert code == 0 and found["target"].items() >= told.items()
    assert {t["tensor"] for t in found["tried"]} == {"O", "LSE", "dQ", "dK", "dV"}
    code, out, _ = flamia("audit", "windowed_attention:windowed", "--window", 20, 0, *asked)
    assert code == 1 and json.loads(out)["statuses"]["mask"] == "leak"  # a window of 20 was promised, 40 are read


@pytest.mark.parametrize("flag", ["quick", "thorough"])
def test_efforts_have_flags_and_time_ends_them(flamia, monkeypatch, tmp_path, flag):
    (tmp_path / "slow_attention.py").write_text(
        "import time, flamia\n"
        "def slow(q, k, v, cu_seqlens):\n"
        "    time.sleep(0.1)\n"
        "    return flamia.attention_varlen(q, k, v, cu_seqlens, causal=True)\n"
    )
    monkeypatch.chdir(tmp_path)
    asked = ("--head-dim", 16, "--heads", 2, "--kv-heads", 1, "--seconds", 1, "--json")
    code, out, _ = flamia("audit", "slow_attention:slow", f"--{flag}", *asked)
    found = json.loads(out)
    assert code == 2 and found["target"]["effort"] == flag and found["verdict"] == "undecided"
    assert any(r.startswith("out of time: ") and "experiments were not run" in r for r in found["reasons"])


def test_recipes_are_audited_against_their_own_claims(flamia):
    code, out, err = flamia("audit", "--recipe", "mxfp8/strict", "--effort", "spot", "--head-dim", 16, "--json")
    found = json.loads(out)
    audited = {row["recipe"] for row in found["rows"]}
    assert "mxfp8/strict" in audited and {"current_scaling", "v_stripes_floor"} <= audited
    assert code == found["exit_code"] and "leak" not in {
        row["report"]["verdict"] for row in found["rows"] if row["recipe"] == "mxfp8/strict"
    }
    assert "audit" in err


# --------------------------------------------------------------------------------------------- training and accuracy


def test_train_evaluate_and_resume(flamia, text, tmp_path):
    common = ["--data", text, "--device", "cpu", "--threads", 1, "--json"]
    small = ["--steps", 3, "--tokens", 400, "--context", 200, "--warmup", 1]
    out_folder = tmp_path / "out"
    recipes = ["-r", "mxfp8/strict", "-r", "bf16"]
    code, out, err = flamia("train", *recipes, *small, *common, "--out", out_folder)
    strict, plain = json.loads(out)
    assert code == 0 and (strict["recipe"], plain["recipe"]) == ("mxfp8/strict", "bf16/strict")
    assert strict["steps"] == 3 and strict["gap"]["own"] != strict["gap"]["exact"] and plain["gap"]["difference"] == 0
    assert (out_folder / "losses.png").stat().st_size > 1000
    assert "mxfp8/strict  3/3  loss" in err

    path = out_folder / "mxfp8-strict" / "step-0000003.pt"
    code, out, _ = flamia("evaluate", path, "--batches", 8, *common)
    assert code == 0 and json.loads(out)["gap"] == strict["gap"]

    code, out, _ = flamia("train", *recipes[:2], *small, *common, "--out", out_folder, "--resume")
    assert code == 0 and json.loads(out)[0]["gap"] == strict["gap"]
    code, out, err = flamia("train", *recipes[:2], *small, *common, "--out", out_folder, "--resume", "--seed", 4)
    assert code == 2 and out == "" and "seed = 0, this run has 4" in err
    code, out, err = flamia("train", *recipes[:2], *small, *common, "--out", out_folder)  # --resume forgotten
    assert code == 2 and out == "" and "step-0000003.pt" in err and "--resume" in err and path.exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("audit", "--recipe", "mxfp8/fast", "--claim", "mask"), "their own claims"),
        (("audit", "--heads", 8), "their own claims"),
        (("audit", "--window", 3, 0), "their own claims"),
        (("audit", "--quick", "--thorough"), "give one of --effort"),
        (("audit", "--target", "sdpa:math", "--dtype", "fp16"), "swept over them"),
        (("audit", "math:sqrt", "--dtype", "int8"), "allowed are bf16"),
        (["audit", "attention.py:forward"], "write attention:forward"),
        (["audit", "math:sqrt", "--device", "gpu"], "write cpu, cuda or cuda:0"),
        (["train", "-r", "mxfp8/safe"], "recipe 'mxfp8/safe': no preset 'safe'; there are strict, fold, fast"),
        (["train", "-r", "fp8"], "recipe 'fp8': no route 'fp8'"),
    ],
)
def test_refusals_say_what_to_write(flamia, arguments, said):
    code, out, err = flamia(*arguments)
    assert code == 2 and out == "" and said in err and "Traceback" not in err


def test_torchs_attention_can_be_trained_as_a_baseline(flamia, text, tmp_path):
    small = [
        "--steps",
        2,
        "--tokens",
        64,
        "--context",
        32,
        "--device",
        "cpu",
        "--out",
        tmp_path / "out",
        "--data",
        text,
    ]
    code, out, _ = flamia("train", "-r", "torch", *small, "--json")
    (found,) = json.loads(out)
    assert code == 0 and found["recipe"] == "torch" and abs(found["gap"]["difference"]) < 1e-3


def test_accuracy_is_a_list_of_measurements_or_a_table(flamia):
    options = ["-r", "mxfp8/strict", "-r", "v_stripes_floor", "--inputs", "sink", "--tokens", 48, "--head-dim", 16]
    code, out, _ = flamia("accuracy", *options, "--json")
    strict, control = json.loads(out)
    assert code == 0 and strict["inputs"] == "sink" and 0 < strict["error"]["dq"] < 0.1
    assert "scale_rule=floor" in control["recipe"]
    code, out, _ = flamia("accuracy", *options)
    assert code == 0 and "mxfp8/strict" in out and "U zero" in out


# --------------------------------------------------------------------------------------------------------- progress


class Terminal:
    def __init__(self, tty: bool) -> None:
        self.tty, self.text = tty, ""

    def isatty(self) -> bool:
        return self.tty

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        pass


def test_progress_is_plain_lines_where_there_is_no_terminal():
    stream = Terminal(tty=False)
    with console.Progress(stream=stream, every=3600) as progress:
        lane = progress.lane("work")
        for done in range(1, 4):
            lane.update(done, 3, f"item {done}")
        lane.update(3, 3)
    assert stream.text == "work  3/3  item 3\n"
    stream = Terminal(tty=False)
    with console.Progress(stream=stream, every=0) as progress:
        progress.lane("work").update(1, 3)
    assert stream.text == "work  1/3\n"


def test_progress_is_a_bar_on_a_terminal():
    stream = Terminal(tty=True)
    with console.Progress(stream=stream) as progress:
        progress.lane("work").update(2, 2, "the last item")
    assert "work" in stream.text and "2/2" in stream.text and "the last item" in stream.text


def test_the_version(flamia):
    import flamia as package

    assert flamia("--version") == (0, f"flamia {package.__version__}\n", "")


def test_numbers_in_sentences():
    from flamia.words import amount

    assert [amount(n, "rank") for n in (0, 1, 2048)] == ["0 ranks", "1 rank", "2,048 ranks"]
