"""vLLM on a CPU: its engine, and the scores of a prompt."""

from loop import serve
from vllm import LLM, SamplingParams


def load(folder):
    model = LLM(folder, dtype="float32", enforce_eager=True, max_model_len=4096, enable_prefix_caching=False)
    asked = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)

    def answer(prompt):
        ids = prompt["ids"]
        [out] = model.generate([{"prompt_token_ids": ids}], asked, use_tqdm=False)
        told = out.prompt_logprobs[1:]
        return {
            "logprobs": [row[token].logprob for row, token in zip(told, ids[1:], strict=True)],
            "tokens": [next(i for i, score in row.items() if score.rank == 1) for row in told],
        }

    return answer


serve(load)
