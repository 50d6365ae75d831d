"""Sentences that more than one command says."""


def window_message(window: int, target: int) -> str:
    """Why a sliding window was removed."""
    return (
        f"every layer had a sliding window of {window} tokens, which hides whatever is further back from a model "
        f"meant to read {target}: the window is removed. If the model was trained on no more than the window "
        "shows, pass that as the trained length"
    )
