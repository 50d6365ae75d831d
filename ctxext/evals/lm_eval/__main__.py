"""lm-evaluation-harness's own command line, with the model `ctxext` registered and our tasks on its path.

    python -m ctxext.evals.lm_eval --model ctxext --model_args pretrained=...,method=yarn,factor=8 --tasks ...

The harness finds models in its own registry alone and reads no entry points, so something must import ours first.
"""

import sys

from ...errors import CtxextError
from ...folders.source import resolve
from . import model as lm_eval_model  # noqa: F401
from .tasks import TASKS_FOLDER, check_limit


def _given(arguments: list[str], *names: str) -> list[tuple[int, str]]:
    """Where the values of an option are, (place, value), as `--name value` or `--name=value`."""
    found = []
    for place, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if equals and name in names:
            found.append((place, value))
        elif argument in names and place + 1 < len(arguments):
            found.append((place + 1, arguments[place + 1]))
    return found


def with_tokenizer(arguments: list[str]) -> list[str]:
    """The same command line with `tokenizer=FOLDER` in `--model_args`, if MODEL is none that transformers knows.

    Tasks that make their own texts, the harness's RULER among them, load the tokenizer of `pretrained` by
    transformers, which knows neither `tiny` nor a path to a .gguf file.
    """
    found = list(arguments)
    for place, value in _given(arguments, "--model_args", "-a"):
        given = {name: text for name, _, text in (part.partition("=") for part in value.split(","))}
        model = given.get("pretrained", "")
        unknown = model == "tiny" or model.endswith(".gguf")
        if unknown and "tokenizer" not in given:
            found[place] += f",tokenizer={resolve(model)}"
    return found


def with_tasks(arguments: list[str]) -> list[str]:
    """The same command line with our tasks on its path, if it runs any and names no other folder."""
    if len(arguments) < 2 or arguments[0] in ("ls", "validate") or _given(arguments, "--include_path"):
        return arguments
    return [*arguments, "--include_path", str(TASKS_FOLDER)]


def main() -> int:
    """Run `lm_eval` with the same arguments; `--include_path` defaults to our tasks."""
    from lm_eval.__main__ import cli_evaluate

    try:
        tasks = [name for _, value in _given(sys.argv[1:], "--tasks", "-t") for name in value.split(",")]
        check_limit(tasks, next((value for _, value in _given(sys.argv[1:], "--limit", "-L")), None))
        sys.argv[1:] = with_tokenizer(with_tasks(sys.argv[1:]))
        cli_evaluate()
    except CtxextError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
