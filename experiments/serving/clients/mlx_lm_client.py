"""MLX-LM: its model class, as its server builds it."""

from pathlib import Path

import mlx.core as mx
from loop import scores, serve
from mlx_lm.utils import load_model


def load(folder):
    model, _ = load_model(Path(folder))

    def answer(prompt):
        return scores(model(mx.array([prompt["ids"]]))[0].astype(mx.float32), prompt["ids"])

    return answer


serve(load)
