"""The loop of every client: folders in, answers out, one JSON line each. It runs where ctxext isn't installed.

A client gives `load(folder)`, which returns a function from a prompt to its answer. A prompt has `ids` and `text`.
An answer has `logprobs`, of each id but the first given those before it, and `tokens`, the likeliest after each id
but the last; or `generated`, the ids that it wrote after the prompt by taking the likeliest each time.
"""

import json
import sys


def scores(logits, ids):
    """The answer for logits of shape (ids, vocabulary), anything that numpy reads."""
    import numpy as np

    rows = np.asarray(logits, dtype=np.float64)[: len(ids) - 1]
    rows = rows - rows.max(axis=1, keepdims=True)
    rows -= np.log(np.exp(rows).sum(axis=1, keepdims=True))
    said = rows[np.arange(len(rows)), ids[1:]]
    return {"logprobs": [float(x) for x in said], "tokens": [int(x) for x in rows.argmax(axis=1)]}


def serve(load):
    """Answer the jobs of the file argv[1] to the file argv[2]; a job that fails is answered with its error."""
    with open(sys.argv[1], encoding="utf-8") as file:
        jobs = [json.loads(line) for line in file]
    with open(sys.argv[2], "a", encoding="utf-8") as out:
        for job in jobs:
            try:
                answer = load(job["folder"])
                row = {"answers": [answer(prompt) for prompt in job["prompts"]]}
            except Exception as error:
                row = {"refused": _told(error)}
            out.write(json.dumps({"job": job["job"], **row}) + "\n")
            out.flush()


def _told(error):
    """The innermost line that says what is wrong."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]
