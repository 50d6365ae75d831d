"""ONNX Runtime GenAI: its model builder, float32 on the CPU, and its engine."""

import subprocess
import sys
import tempfile

import onnxruntime_genai as og
from loop import scores, serve


def load(folder):
    made = tempfile.TemporaryDirectory()
    builder = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-p", "fp32", "-e", "cpu"]
    built = subprocess.run(
        [*builder, "-i", folder, "-o", made.name, "-c", made.name],
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    if built.returncode:
        raise ValueError(built.stderr.strip().splitlines()[-1])
    model = og.Model(made.name)

    def answer(prompt, keep=made):
        params = og.GeneratorParams(model)
        params.set_search_options(max_length=len(prompt["ids"]) + 1)
        generator = og.Generator(model, params)
        generator.append_tokens(prompt["ids"])
        return scores(generator.get_output("logits")[0], prompt["ids"])

    return answer


serve(load)
