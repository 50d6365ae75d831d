"""mistral.rs: its engine, which tells the tokens that it writes and no scores of the prompt's."""

import tempfile

from loop import serve
from mistralrs import ChatCompletionRequest, ModelDType, Runner, Which

# Scores are told of chats alone: a chat that is its one message.
TEMPLATE = tempfile.NamedTemporaryFile("w", suffix=".jinja")  # noqa: SIM115
TEMPLATE.write("{{ messages[0]['content'] }}")
TEMPLATE.flush()


def load(folder):
    runner = Runner(which=Which.Plain(model_id=folder, dtype=ModelDType.F32), jinja_explicit=TEMPLATE.name)

    def answer(prompt):
        request = ChatCompletionRequest(
            messages=[{"role": "user", "content": prompt["text"]}],
            model="m",
            max_tokens=24,
            temperature=0.0,
            logprobs=True,
            top_logprobs=1,
        )
        reply = runner.send_chat_completion_request(request)
        if reply.usage.prompt_tokens != len(prompt["ids"]):
            raise ValueError(f"{reply.usage.prompt_tokens} tokens, {len(prompt['ids'])} in transformers")
        best = [token.top_logprobs[0] for token in reply.choices[0].logprobs.content]
        return {"generated": [b.token for b in best], "logprobs": [b.logprob for b in best]}

    return answer


serve(load)
