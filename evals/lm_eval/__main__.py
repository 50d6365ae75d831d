"""lm-evaluation-harness's own command line, with the model `ctxext` registered and our tasks on its path.

    python -m ctxext_evals.lm_eval --model ctxext --model_args pretrained=...,method=yarn,factor=8 --tasks ...

The harness finds models in its own registry alone and reads no entry points, so something must import ours first.
"""

import sys

from ctxext.errors import CtxextError
from ctxext_evals import lm_eval_model  # noqa: F401
from ctxext_evals.lm_eval_tasks import TASKS_FOLDER


def main() -> int:
    """Run `lm_eval` with the same arguments; `--include_path` defaults to our tasks."""
    from lm_eval.__main__ import cli_evaluate

    if "--include_path" not in sys.argv and {"ls", "validate"}.isdisjoint(sys.argv[1:2]) and len(sys.argv) > 2:
        sys.argv += ["--include_path", str(TASKS_FOLDER)]
    try:
        cli_evaluate()
    except CtxextError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
