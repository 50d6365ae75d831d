"""The command line: what is printed where, exit codes, and help that answers at once."""

import json
import subprocess
import sys

import pytest
from conftest import run
from typer.testing import CliRunner

from ctxext import methods
from ctxext.cli.app import app
from ctxext.errors import UsageError
from ctxext.methods.settings import parse_settings


def test_methods_lists_the_registry(monkeypatch, capsys):
    code, out, _ = run(monkeypatch, capsys, "methods", "--json")
    assert code == 0
    assert [m["name"] for m in json.loads(out)] == list(methods.all_methods())
    code, out, _ = run(monkeypatch, capsys, "methods")
    assert code == 0
    assert all(name in out for name in methods.all_methods())


def test_patch_writes_and_reports(monkeypatch, capsys, llama_folder, tmp_path):
    out_folder = tmp_path / "out"
    args = ("patch", llama_folder, "--method", "yarn", "--factor", 4, "--set", "beta_fast=16", "-o", out_folder)
    code, out, err = run(monkeypatch, capsys, *args, "--json")
    assert code == 0, err
    done = json.loads(out)
    assert done["written"] is True
    assert done["schedule"]["params"]["beta_fast"] == 16.0
    assert done["config"] == {
        k: json.loads((out_folder / "config.json").read_text())[k]
        for k in ("rope_parameters", "rope_theta", "max_position_embeddings")
    }
    code, out, err = run(monkeypatch, capsys, *args)
    assert code == 1
    assert "exists already" in err
    assert "--force" in err
    assert "Traceback" not in err
    code, out, _ = run(monkeypatch, capsys, *args, "--force")
    assert code == 0
    assert "64 -> 256 tokens" in out


def test_dry_run_writes_nothing(monkeypatch, capsys, llama_folder, tmp_path):
    monkeypatch.chdir(tmp_path)
    code, out, _ = run(
        monkeypatch, capsys, "patch", llama_folder, "--method", "pi", "--factor", 2, "--dry-run", "--json"
    )
    assert code == 0
    assert json.loads(out)["out"] == "pico-llama-pi-2x"
    assert json.loads(out)["written"] is False
    assert list(tmp_path.iterdir()) == []


def test_factors_from_a_file(monkeypatch, capsys, llama_folder, tmp_path):
    (tmp_path / "factors.json").write_text(json.dumps([1 + i / 4 for i in range(16)]))
    setting = f"long_factor=@{tmp_path / 'factors.json'}"
    args = (
        "patch",
        llama_folder,
        "--method",
        "longrope",
        "--set",
        setting,
        "-o",
        tmp_path / "out",
        "--set",
        "start_tokens=4",
    )
    code, out, _ = run(monkeypatch, capsys, *args)
    assert code == 0
    assert "ctxext.load" in out


@pytest.mark.parametrize(
    ("args", "code", "messages"),
    [
        (("--method", "yran"), 2, ["did you mean 'yarn'"]),
        (("--method", "yarn", "--set", "beta_fsat=1"), 2, ["no option 'beta_fsat'", "did you mean 'beta_fast'"]),
        (("--method", "yarn", "--set", "beta_fast"), 2, ["is not NAME=VALUE"]),
        (("--method", "yarn", "--factor", "0.5"), 2, ["at least 1"]),
        (("--method", "yarn", "--factor", "nan"), 2, ["must be a number"]),
        (("--method", "yarn", "--factor", "-1"), 2, ["at least 1"]),
        (("--method", "yarn", "--existing", "destroy"), 2, ["--existing", "refuse", "replace", "compose"]),
        (("--method", "longrope"), 2, ["needs long_factor", "--set long_factor="]),
        (("--method", "longrope", "--set", "long_factor=[1,2]"), 2, ["has 2 values, the model has 16"]),
        (("--method", "longrope", "--set", "long_factor=@/no/file"), 2, ["can't read a JSON value from /no/file"]),
        ((), 2, ["--method"]),
    ],
)
def test_usage_errors(args, code, messages, monkeypatch, capsys, llama_folder, tmp_path):
    monkeypatch.chdir(tmp_path)
    got, out, err = run(monkeypatch, capsys, "patch", llama_folder, *args)
    flat = " ".join(err.replace("│", " ").split())
    assert got == code
    assert all(message in flat for message in messages), err
    assert out == ""
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


def test_verbose_shows_the_traceback(monkeypatch, capsys):
    from ctxext.errors import CtxextError

    with pytest.raises(CtxextError):
        run(monkeypatch, capsys, "-v", "patch", "/no/such", "--method", "pi")


def test_inspect(monkeypatch, capsys, llama_folder, tmp_path):
    picture = tmp_path / "waves.png"
    code, out, _ = run(monkeypatch, capsys, "inspect", llama_folder, "--factor", 4, "--json", "--plot", picture)
    assert code == 0
    report = json.loads(out)
    assert report["rope"]["theta"] == 10000.0
    assert report["target_length"] == 256
    assert report["table"][0]["wavelength"] == pytest.approx(6.283185, rel=1e-6)
    assert report["table"][0]["after"]["pi"] == pytest.approx(4 * 6.283185, rel=1e-6)
    assert report["table"][3]["after"]["nope"] is None
    staged = ["dynamic_ntk", "dynamic_pi", "dynamic_yarn", "longrope"]
    more_than_a_table = ["alibi", "dual_chunk", "rerope", "self_extend", "sinusoidal", "t5_bias"]
    assert [e["method"] for e in report["left_out"]] == sorted(staged + more_than_a_table)
    assert picture.read_bytes().startswith(b"\x89PNG")
    code, out, _ = run(monkeypatch, capsys, "inspect", llama_folder)
    assert code == 0
    assert "trained length" in out


def test_every_command_has_help():
    runner = CliRunner()
    for command in ("methods", "inspect", "patch"):
        assert runner.invoke(app, [command, "--help"]).exit_code == 0


def test_help_imports_nothing_heavy():
    """Half a second is only possible if torch, transformers and friends stay out."""
    code = (
        "import sys; from ctxext import cli; sys.argv = ['ctxext', '--help']\n"
        "try: cli.main()\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'peft', 'datasets', 'matplotlib', 'numpy'} & set(sys.modules)\n"
        "print('heavy:', sorted(heavy))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "heavy: []" in ran.stdout
    assert "eval" in ran.stdout


def test_patching_a_folder_imports_nothing_heavy(llama_folder, tmp_path):
    code = (
        "import sys; from ctxext.folders.patch import patch_checkpoint\n"
        f"patch_checkpoint({str(llama_folder)!r}, {str(tmp_path / 'out')!r}, method='yarn', factor=4)\n"
        "print(sorted({'torch', 'transformers', 'safetensors', 'numpy'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_settings():
    assert parse_settings(["a=1", "b-c=true", "d=x", "e=[1,2]", "f=None"]) == {
        "a": 1,
        "b_c": True,
        "d": "x",
        "e": [1, 2],
        "f": None,
    }
    with pytest.raises(UsageError, match="given twice"):
        parse_settings(["a=1", "a=2"])


def test_main_can_be_called_twice(monkeypatch, capsys, llama_folder, tmp_path):
    """In one process, with a failure in between: same commands, same answers, no state left over."""
    import warnings

    shown = warnings.showwarning
    first = run(monkeypatch, capsys, "patch", llama_folder, "-m", "pi", "--dry-run", "--json")
    assert run(monkeypatch, capsys, "-v", "patch", llama_folder, "-m", "nothing")[0] == 2
    assert run(monkeypatch, capsys, "patch", llama_folder, "-m", "pi", "--dry-run", "--json") == first
    assert warnings.showwarning is shown
