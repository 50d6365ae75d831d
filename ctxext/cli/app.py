"""The `ctxext` command. Commands are thin: they parse, call one function, and print its result.

Anything heavy is imported inside a command, so that --help answers at once.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer

from .. import __version__, terminal
from ..errors import CtxextError, CtxextWarning, UsageError
from ..files import spelled
from ..plots import drawable
from . import evaluate, output, serve
from .compare import compare
from .demo import demo
from .options import (
    Dtype,
    Existing,
    Factor,
    Fallback,
    Json,
    MethodName,
    Model,
    Set,
    Target,
    TrainedLength,
    TrustRemoteCode,
    method_settings,
)
from .search import search
from .temperature import fit_temperature

app = typer.Typer(
    name="ctxext",
    help="Extend the context of a pretrained model, and measure honestly whether it worked.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _main(
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show tracebacks.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    terminal.verbose = verbose


@app.command()
def methods(
    json: Json = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="As a Markdown table.")] = False,
) -> None:
    """List every method with its options, formula and source."""
    from .. import methods as registry

    if markdown and json:
        raise UsageError("--markdown and --json exclude each other")
    found = registry.all_methods().values()
    if markdown:
        print(output.methods_markdown(found))
    elif json:
        terminal.print_json([output.method_dict(m) for m in found])
    else:
        output.print_methods(found)


@app.command()
def inspect(
    model: Model,
    factor: Factor = 4.0,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Also draw the wavelengths to this PNG or SVG.")
    ] = None,
    trained_length: TrainedLength = None,
    json: Json = False,
) -> None:
    """Show a model's rope, and what each method would make of it."""
    from ..folders.inspect import inspect_model, plot_wavelengths

    if plot:
        drawable(plot)
    report = inspect_model(model, factor, trained_length=trained_length)
    if plot:
        plot_wavelengths(report, plot)
    if json:
        terminal.print_json(report)
    else:
        output.print_inspection(report)
        if plot:
            terminal.say(f"wavelengths drawn to {terminal.escape(str(plot))}")


@app.command()
def patch(
    model: Model,
    method: MethodName,
    factor: Factor = 4.0,
    settings: Set = None,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="Folder to write; default MODEL-METHOD-FACTORx.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the folder if it exists.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be written, write nothing.")] = False,
    link: Annotated[bool, typer.Option("--link/--copy", help="Hard-link the weights, or copy them.")] = True,
    trained_length: TrainedLength = None,
    existing: Existing = "refuse",
    dtype: Dtype = "bfloat16",
    fallback: Fallback = "refuse",
    target: Target = "all",
    trust_remote_code: TrustRemoteCode = False,
    in_gguf: Annotated[
        bool, typer.Option("--in-gguf", help="Write a .gguf from a .gguf: quantised weights stay as they are.")
    ] = False,
    json: Json = False,
) -> None:
    """Write a patched copy of a model that plain transformers loads. Weights are linked, never read."""
    from ..folders import patch as folders

    params = method_settings(method, settings)
    if in_gguf:
        if target != "all":
            raise UsageError(f"--target {target} is for folders", hint="leave it out: a .gguf is for llama.cpp")
        from .serve import patch_gguf_file

        given = {"trained_length": trained_length, "existing": existing, "fallback": fallback, "force": force}
        patch_gguf_file(model, out, method, factor, json=json, dry_run=dry_run, **given, **params)
        return

    asked = folders.Request(method, factor, params, trained_length, existing, fallback, target, trust_remote_code)
    goal = out or folders.default_out(model, method, factor)
    if dry_run:
        schedule, config = folders.preview(model, asked, dtype=dtype)
        left_out = folders.check_out(model, goal, force)
        done = folders.Patched(goal, schedule, config, 0, 0, left_out)
    else:
        done = folders.write(model, goal, asked, dtype=dtype, force=force, link=link)
    if json:
        terminal.print_json(output.patched_dict(done, dry_run=dry_run))
    else:
        output.print_patched(done, dry_run=dry_run)


@app.command()
def train(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="A YAML file such as those in recipes/.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Changes, such as train.steps=50.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint of this run.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the recipe; show it resolved, its tokens, memory and time.")
    ] = False,
    json: Json = False,
) -> None:
    """Fine-tune a patched model by a recipe; `accelerate launch -m ctxext train ...` for several processes."""
    if dry_run:
        from ..training.estimate import describe
        from ..training.recipe import load_recipe

        checked = load_recipe(recipe, overrides or [])
        estimate = describe(checked)
        if json:
            terminal.print_json({"recipe": checked.model_dump(mode="json"), **estimate})
        else:
            output.print_estimate(checked.resolved(), estimate)
        return
    from ..training.run import train as run

    done = run(recipe, overrides or [], resume=resume)
    if json:
        terminal.print_json(done)
    else:
        output.print_trained(done)


@app.command()
def merge(
    adapter: Annotated[Path, typer.Argument(metavar="ADAPTER", help="The adapter folder that a run wrote.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder to write.")],
    base: Annotated[str | None, typer.Option(help="Where the base model is, if it moved.")] = None,
    dtype: Annotated[str, typer.Option(help="Of the weights: auto (the base's), float32 or bfloat16.")] = "auto",
    force: Annotated[bool, typer.Option("--force", help="Replace the folder if it exists.")] = False,
    json: Json = False,
) -> None:
    """Write an adapter and its base as one folder for plain transformers and servers."""
    from ..folders.merge import merge as run

    done = run(adapter, out, base=base, dtype=dtype, force=force)
    if json:
        method = None if done.schedule is None else done.schedule.to_dict()
        terminal.print_json(
            {"out": str(done.out), "schedule": method, "rounding": done.rounding, "left_out": list(done.left_out)}
        )
    else:
        moved = f"writing the sum moved logits by {done.rounding:.2g}"
        terminal.say(f"wrote {terminal.escape(str(done.out))}; read back exactly; {moved}")
        if done.left_out:
            names = terminal.escape(", ".join(done.left_out))
            terminal.say(f"left out, as copies of the base without the adapter: {names}")


app.command("search")(search)
app.registered_commands += serve.app.registered_commands
app.add_typer(evaluate.app, name="eval")
app.command("compare")(compare)
app.command("demo")(demo)
app.command("fit-temperature")(fit_temperature)


def _show_warning(message: Warning | str, category: type[Warning], *rest: Any, **more: Any) -> None:
    if issubclass(category, CtxextWarning):
        terminal.say(f"[yellow]warning:[/] {terminal.escape(str(message))}")


def main() -> None:
    """Entry point; can be called again. Exit codes: 0 done, 1 failed, 2 wrong usage or recipe, 130 interrupted."""
    if not sys.stderr.isatty():
        # Read by huggingface_hub and transformers when they are imported: no bars in logs and pipes.
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    terminal.print_anything()
    shown = warnings.showwarning
    warnings.showwarning = _show_warning
    try:
        app()
    except (CtxextError, OSError) as error:
        if terminal.verbose:
            raise
        sys.exit(terminal.say_error(error))
    except UnicodeEncodeError as error:
        if terminal.verbose or not isinstance(error.object, str) or error.object == spelled(error.object):
            raise
        what = f"this locale can't spell {spelled(error.object)} for the libraries that read it"
        sys.exit(terminal.say_error(CtxextError(what, hint="set PYTHONUTF8=1, or LC_ALL=C.UTF-8")))
    except KeyboardInterrupt:
        terminal.say("interrupted")
        sys.exit(130)
    finally:
        warnings.showwarning = shown
