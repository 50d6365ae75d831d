"""Commands for what comes after patching: who runs the folder, other formats, repairs, the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from .. import methods, terminal
from ..errors import UsageError
from ..folders.gguf_export import Dtype, Format
from ..folders.patch import default_out
from ..rope import Rope
from .options import (
    Existing,
    Factor,
    Fallback,
    Json,
    Model,
    OptionalMethod,
    Set,
    Target,
    TrainedLength,
    TrustRemoteCode,
    method_settings,
)

app = typer.Typer()


@app.command()
def export(
    model: Model,
    to: Annotated[Format, typer.Option("--to", help="The format.")] = "gguf",
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="File to write; default MODEL-DTYPE.gguf.")
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help="Of matrices; vectors are f32.")] = "f16",
    fallback: Fallback = "refuse",
    pretokenizer: Annotated[
        str | None, typer.Option(help="llama.cpp's tokenizer.ggml.pre, where it can't be told.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
    json: Json = False,
) -> None:
    """Write a model, with its schedule, as a GGUF file that llama.cpp runs exactly."""
    from ..folders import gguf_export

    done = gguf_export.export(
        model, out, to=to, dtype=dtype, force=force, fallback=fallback, pretokenizer=pretokenizer
    )
    if json:
        terminal.print_json(
            {
                "out": str(done.out),
                "architecture": done.architecture,
                "dtype": done.dtype,
                "tokenizer": done.tokenizer,
                "tensors": done.tensors,
                "schedule": done.schedule.to_dict(),
                **_rope_dict(done.rope),
            }
        )
    else:
        print(f"wrote {done.out}: {done.architecture}, {done.dtype}, {done.tensors} tensors")
        _print_rope(done)


@app.command()
def portability(
    model: Annotated[str | None, typer.Argument(metavar="[MODEL]", help="A patched folder, or any MODEL.")] = None,
    method: OptionalMethod = None,
    factor: Factor = 4.0,
    settings: Set = None,
    target: Target = "all",
    fallback: Fallback = "refuse",
    trained_length: TrainedLength = None,
    existing: Existing = "refuse",
    trust_remote_code: TrustRemoteCode = False,
    json: Json = False,
) -> None:
    """Say what each runtime will do with a folder, or with what a method would write, and how to serve it."""
    from ..folders.patch import Request, patched_config, preview
    from ..folders.source import is_gguf, peek, resolve
    from ..folders.weights import native_copy
    from ..runtimes.portability import gguf_portability, serve_without_patching, stand_in
    from ..runtimes.portability import portability as verdicts

    options = method_settings(method, settings)
    name, unpatched = model or "FOLDER", {}
    native = model is not None and not is_gguf(model) and native_copy(resolve(model))
    if method is None:
        if model is None:
            raise UsageError("give a MODEL, or --method and --factor")
        config = peek(model)
        found = gguf_portability(config, model) if is_gguf(model) else verdicts(config, model, native=native)
    elif model is None:
        schedule = methods.schedule(Rope(500000.0, 128, trained_length or 8192), method, factor, **options)
        config = patched_config(stand_in(schedule.rope), schedule, fallback=fallback, target=target)
        found = verdicts(config, name)
        rope = schedule.rope
        terminal.say(
            f"supposed: a Llama with theta {rope.theta:g}, {rope.dim} rotary dimensions, trained on "
            f"{rope.trained_length:,} tokens; give MODEL for its own figures"
        )
    else:
        asked = Request(
            method,
            factor,
            options,
            trained_length=trained_length,
            existing=existing,
            target=target,
            fallback=fallback,
            trust_remote_code=trust_remote_code,
        )
        schedule, config = preview(model, asked)
        name = str(default_out(model, method, factor))
        found = verdicts(config, name)
        unpatched = {} if is_gguf(model) else serve_without_patching(schedule, config, model, native=native)
    if json:
        keys = {k: config.get(k) for k in ("rope_parameters", "rope_theta", "max_position_embeddings")}
        document = {"model": model, "config": keys, "results": [v.to_dict() for v in found]}
        terminal.print_json(document | {"without_patching": unpatched})
        return
    columns = ("runtime", "version", "", "note", "known by")
    rows = ([v.runtime, v.version, v.runs, v.note, v.evidence] for v in found)
    terminal.print_table(f"who runs {name}", columns, rows, left=5)
    for verdict in found:
        if verdict.runs in ("exact", "approximates"):
            print(f"{verdict.runtime}:  {verdict.command}")
    for runtime, line in unpatched.items():
        print(f"{runtime}, the unpatched model:  {line}")


def patch_gguf_file(
    model: str, out: Path | None, method: str, factor: float, *, json: bool, dry_run: bool, **options: Any
) -> None:
    """`ctxext patch x.gguf --in-gguf`: run it and print what it did."""
    from ..folders.gguf_patch import patch_gguf

    done = patch_gguf(model, out, method=method, factor=factor, dry_run=dry_run, **options)
    if json:
        head = {"out": str(done.out), "written": not dry_run, "schedule": done.schedule.to_dict()}
        terminal.print_json(head | _rope_dict(done.rope))
    else:
        print(f"{'would write' if dry_run else 'wrote'} {done.out}, weights untouched")
        _print_rope(done)


def _rope_dict(rope: Any) -> dict[str, Any]:
    return {"keys": rope.keys, "rope_freqs": None if rope.freqs is None else list(rope.freqs)}


def _print_rope(done: Any) -> None:
    schedule = done.schedule
    named = "unpatched" if schedule.method == "none" else f"{schedule.method} x{schedule.factor:g}"
    print(f"  {named}, reads {schedule.max_length:,} tokens")
    said = ", ".join(f"{k} {v:g}" if isinstance(v, float) else f"{k} {v}" for k, v in done.rope.keys.items())
    print(f"  {said}{', rope_freqs.weight' if done.rope.freqs else ''}")
    print(f"  llama-server -m {done.out} -c {schedule.max_length}")


@app.command()
def doctor(
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="A model or adapter folder that anyone wrote.")],
    fix: Annotated[
        bool, typer.Option("--fix", help="Mend what can be mended; old files are kept beside.")
    ] = False,
    context: Annotated[
        int | None, typer.Option(help="Tokens it was trained to read, if the folder forgot to say.", min=2)
    ] = None,
    json: Json = False,
) -> None:
    """Find what is wrong with a folder's rope, explain it, and with --fix mend it. Exit 1 if an error is left."""
    from ..folders.doctor import doctor as run

    found = run(folder, fix=fix, context=context)
    if json:
        lists = {k: [f.to_dict() for f in getattr(found, k)] for k in ("findings", "mended", "left")}
        terminal.print_json({"folder": str(found.folder), **lists})
    elif not found.findings:
        print(f"{found.folder}: nothing wrong found")
    else:
        for finding in found.findings:
            done = "mended" if finding in found.mended else finding.level
            print(f"{done}: {finding.where}: {finding.what}\n    fix: {finding.fix}   ({finding.report})")
        for finding in found.left:
            if finding not in found.findings:
                print(f"{finding.level}: {finding.where}: {finding.what}\n    fix: {finding.fix}")
    if any(f.level == "error" for f in found.left):
        raise typer.Exit(1)


@app.command()
def push(
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="A patched, merged or adapter folder.")],
    repo: Annotated[str, typer.Argument(metavar="REPO", help="Where to: owner/name.")],
    base_model: Annotated[str | None, typer.Option(help="Hub id of the model that was patched.")] = None,
    license: Annotated[str | None, typer.Option(help="For the card, such as apache-2.0.")] = None,
    private: Annotated[bool, typer.Option("--private", help="Create a private repository.")] = False,
    create_pr: Annotated[bool, typer.Option("--create-pr", help="Open a pull request.")] = False,
    message: Annotated[str | None, typer.Option("-m", "--message", help="Commit message.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Send it even if doctor finds errors.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the card and files, send nothing.")] = False,
    json: Json = False,
) -> None:
    """Send a folder to the Hugging Face hub, checked first, with the card's metadata (base model, tags)."""
    from ..folders.push import push as run

    options = {"base_model": base_model, "license": license, "private": private, "create_pr": create_pr}
    done = run(folder, repo, message=message, force=force, dry_run=dry_run, **options)
    if json:
        terminal.print_json({"repo": done.repo, "files": list(done.files), "card": done.card, "url": done.url})
    elif done.url is None:
        print(done.card)
        print("would send: " + ", ".join(done.files))
    else:
        print(f"sent {len(done.files)} files: {done.url}")
