"""CTranslate2: its converter for transformers, and its scores of a prompt."""

import json
import os
import tempfile

import ctranslate2
import numpy as np
from loop import scores, serve


def load(folder):
    made = tempfile.TemporaryDirectory()
    out = os.path.join(made.name, "model")
    ctranslate2.converters.TransformersConverter(folder).convert(out)
    generator = ctranslate2.Generator(out, device="cpu", compute_type="float32")
    with open(os.path.join(out, "vocabulary.json"), encoding="utf-8") as file:
        words = json.load(file)

    def answer(prompt, keep=made):
        ids = prompt["ids"]
        rows = generator.forward_batch([[words[i] for i in ids]], return_log_probs=True)
        return scores(np.array(rows)[0], ids)

    return answer


serve(load)
