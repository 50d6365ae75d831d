"""lm-evaluation-harness's own command line, with the model `ctxext` registered and our tasks on its path.

    python -m ctxext_evals.lm_eval --model ctxext --model_args pretrained=...,method=yarn,factor=8 --tasks ...

The harness finds models in its own registry alone and reads no entry points, so something must import ours first.
"""

import sys

from ctxext.errors import CtxextError
from ctxext.resolve import resolve
from ctxext_evals import lm_eval_model  # noqa: F401
from ctxext_evals.lm_eval_tasks import TASKS_FOLDER


def with_tokenizer(arguments: list[str]) -> list[str]:
    """The same command line with `tokenizer=FOLDER` in `--model_args`, if MODEL is none that transformers knows.

    Tasks that make their own texts, the harness's RULER among them, load the tokenizer of `pretrained` by
    transformers, which knows neither `tiny` nor a path to a .gguf file.
    """
    found = list(arguments)
    for place, argument in enumerate(arguments[:-1]):
        given = dict(part.partition("=")[::2] for part in arguments[place + 1].split(","))
        model = given.get("pretrained", "")
        unknown = model == "tiny" or model.endswith(".gguf")
        if argument in ("--model_args", "-a") and unknown and "tokenizer" not in given:
            found[place + 1] += f",tokenizer={resolve(model)}"
    return found


def main() -> int:
    """Run `lm_eval` with the same arguments; `--include_path` defaults to our tasks."""
    from lm_eval.__main__ import cli_evaluate

    if "--include_path" not in sys.argv and {"ls", "validate"}.isdisjoint(sys.argv[1:2]) and len(sys.argv) > 2:
        sys.argv += ["--include_path", str(TASKS_FOLDER)]
    try:
        sys.argv[1:] = with_tokenizer(sys.argv[1:])
        cli_evaluate()
    except CtxextError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
