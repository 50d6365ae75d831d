"""Needles: the passkey prompt of Mohtashami and Jaggi ("Landmark Attention", 2023), which the whole field copies.

The strings are here, for evaluators, training data and the search alike. `prompts` makes prompts of an exact
length, `token_ids` hides keys in token ids.
"""

TASK = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there."
)
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = "The pass key is {key}. Remember it. {key} is the pass key."
QUESTION = "What is the pass key? The pass key is"


def passkey_prompt(before: str, after: str, key: str) -> str:
    """The whole prompt: task, text before, needle, text after, question; one per line."""
    return "\n".join([TASK, before, NEEDLE.format(key=key), after, QUESTION])
