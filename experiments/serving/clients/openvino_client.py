"""OpenVINO by optimum-intel: exported in float32, run in float32."""

from loop import scores, serve


def load(folder):
    import torch
    from optimum.intel import OVModelForCausalLM

    exact = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    model = OVModelForCausalLM.from_pretrained(
        folder, export=True, compile=True, load_in_8bit=False, ov_config=exact
    )

    def answer(prompt):
        return scores(model(torch.tensor([prompt["ids"]])).logits[0].numpy(), prompt["ids"])

    return answer


serve(load)
