"""What holds for all commands: help, exit codes, errors."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import fxskip
from fxskip.cli import exit_code
from tests.cli.command import run

COMMANDS = ("plan", "convert", "distill", "eval", "doctor")
ROOT = Path(__file__).parents[2]
# The package without its __init__.py, which imports torch for those who use it as a library.
BARE = """
import sys, types
sys.modules["fxskip"] = package = types.ModuleType("fxskip")
package.__path__ = [sys.argv.pop(1)]
from fxskip.cli import main
try:
    main()
finally:
    print(sorted({"torch", "transformers"} & sys.modules.keys()))
"""


@pytest.mark.parametrize(
    "arguments", [["--help"], ["distill", "--help"], ["convert", "nowhere", "farskip", "out"]]
)
def test_help_and_usage_errors_need_no_torch(arguments):
    command = [sys.executable, "-c", BARE, str(ROOT / "fxskip"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == (0 if "--help" in arguments else 2)
    assert done.stdout.endswith("[]\n"), done.stdout


def test_help_lists_the_commands_and_every_exit_code(capsys):
    assert run("--help") == 0
    text = capsys.readouterr().out
    assert all(f"\n  {name} " in text for name in COMMANDS)
    assert all(f"\n    {code.value:<5}" in text for code in exit_code.ExitCode)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_each_command_has_an_example_and_its_exit_codes(capsys, name):
    assert run(name, "--help") == 0
    text = capsys.readouterr().out
    assert f"  Example:\n    fxskip {name} " in text
    assert "Exit codes: " in text


def test_version(capsys):
    assert run("--version") == 0
    assert capsys.readouterr().out == f"fxskip {fxskip.__version__}\n"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (fxskip.SpecError("s", "f", hint="h"), 2),
        (fxskip.FxskipError("s", "f", hint="h"), 2),
        (fxskip.CaptureError("s", "f", hint="h"), 3),
        (fxskip.PassError("s", "f", hint="h"), 3),
        (fxskip.ScheduleError("s", "f", hint="h"), 3),
        (fxskip.CheckpointError("s", "f", hint="h"), 4),
        (fxskip.CacheError("s", "f", hint="h"), 4),
        (PermissionError(13, "Permission denied", "plan.html"), 4),
        (KeyboardInterrupt(), 130),
        (RuntimeError("a defect"), 70),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_error_has_its_exit_code(monkeypatch, capsys, error, code, original):
    def fail(*_):
        raise error

    monkeypatch.setattr(fxskip, "load_spec", fail)
    assert run("plan", original, "farskip") == code
    out, err = capsys.readouterr()
    assert out == ""
    assert ("Traceback" in err) == (code == 70)
    if isinstance(error, fxskip.FxskipError):
        assert err == f"{error}\n"


@pytest.mark.parametrize("way", ["option", "environment"])
def test_traceback_on_request(monkeypatch, capsys, original, way):
    if way == "environment":
        monkeypatch.setenv("FXSKIP_TRACEBACK", "1")
    before = ["--traceback"] if way == "option" else []
    assert run(*before, "plan", original, "nonsense.yaml") == 2
    err = capsys.readouterr().err
    assert "Traceback" in err and "SpecError: nonsense.yaml" in err


def test_python_m_fxskip_is_the_same(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["fxskip", "--version"])
    with pytest.raises(SystemExit) as end:
        runpy.run_module("fxskip", run_name="__main__")
    assert end.value.code == 0
