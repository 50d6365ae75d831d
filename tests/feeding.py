"""Ways of feeding a text to a model, each beside what its logits must equal: the rows of the invariants matrix."""

import copy

import torch
from conftest import logits

TRAINED, LENGTH = 64, 200
TOLERANCE = 1e-4

# Each feeds `tokens` (1, 200) in its own way and returns (logits, expected), to be compared.


def whole(model, tokens):
    return logits(model, tokens)


def decode(model, tokens, start=50, cache=None):
    """Prefill `start` tokens, then one by one."""
    parts = []
    with torch.no_grad():
        out = model(tokens[:, :start], cache=cache, use_cache=True)
        parts.append(out.logits)
        for i in range(start, tokens.shape[1]):
            out = model(tokens[:, i : i + 1], cache=out.cache, use_cache=True)
            parts.append(out.logits)
    return torch.cat(parts, 1)


def chunks(model, tokens, size):
    parts, cache = [], None
    with torch.no_grad():
        for piece in tokens.split(size, 1):
            out = model(piece, cache=cache, use_cache=True)
            cache = out.cache
            parts.append(out.logits)
    return torch.cat(parts, 1)


def prefixes(model, tokens):
    """The oracle: each probed position from a fresh forward over its prefix alone, no cache."""
    probes = range(45, tokens.shape[1], 5)
    with torch.no_grad():
        return torch.cat([model(tokens[:, : n + 1], use_cache=False).logits[:, -1:] for n in probes], 1), probes


def static_cache(model, tokens):
    from transformers import StaticCache

    return decode(model, tokens, 50, StaticCache(config=model.config, max_cache_len=224))


def left_padded(model, tokens, size):
    """A row of `size` beside a row of 200: the short one starts later, and is in other stages."""
    pad, short = LENGTH - size, tokens[:, :size].flip(1)
    batch = torch.cat((torch.cat((torch.zeros(1, pad, dtype=torch.long), short), 1), tokens))
    mask = torch.ones_like(batch)
    mask[0, :pad] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        out = model(batch, attention_mask=mask, position_ids=positions).logits
    return torch.cat((out[:1, pad:], out[1:, :]), 1), torch.cat((logits(model, short), logits(model, tokens)), 1)


def left_padded_decode(model, tokens):
    """The same, decoding both rows in different stages from a common cache."""
    short = tokens[:, :150].flip(1)
    batch = torch.cat((torch.cat((torch.zeros(1, 50, dtype=torch.long), short), 1), tokens))
    mask = torch.ones_like(batch)
    mask[0, :50] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        out = model(batch[:, :110], attention_mask=mask[:, :110], position_ids=positions[:, :110], use_cache=True)
        parts = [out.logits]
        for i in range(110, 200):
            out = model(
                batch[:, i : i + 1],
                attention_mask=mask[:, : i + 1],
                position_ids=positions[:, i : i + 1],
                cache=out.cache,
                use_cache=True,
            )
            parts.append(out.logits)
    got = torch.cat(parts, 1)
    return torch.cat((got[:1, 50:], got[1:]), 1), torch.cat((logits(model, short), logits(model, tokens)), 1)


def crop_and_continue(model, tokens):
    """Run to 150, take 70 tokens back (into an earlier stage), go on with others: assisted decoding does this."""
    other = torch.cat((tokens[:, :80], tokens[:, 80:].flip(1)), 1)
    with torch.no_grad():
        cache = model(tokens[:, :150], use_cache=True).cache
        cache.crop(-70)
        rest = model(other[:, 80:], cache=cache, use_cache=True).logits
    return rest, logits(model, other)[:, 80:]


def forked(model, tokens):
    """A cache deep-copied for another continuation, as prompt caching does."""
    other = torch.cat((tokens[:, :100], tokens[:, 100:].flip(1)), 1)
    with torch.no_grad():
        first = model(tokens[:, :100], use_cache=True).cache
        second = copy.deepcopy(first)
        model(tokens[:, 100:], cache=first, use_cache=True)
        rest = model(other[:, 100:], cache=second, use_cache=True).logits
    return rest, logits(model, other)[:, 100:]


def second_call(model, tokens):
    """Exactly the trained length, then 80 tokens, after a long call."""
    fresh = [logits(copy.deepcopy(model), tokens[:, :n]) for n in (TRAINED, 80)]
    logits(model, tokens)
    return torch.cat([logits(model, tokens[:, :n]) for n in (TRAINED, 80)], 1), torch.cat(fresh, 1)


ROWS = {
    "decode": lambda m, t: (decode(m, t), whole(m, t)),
    "decode from an empty prompt": lambda m, t: (decode(m, t, 1), whole(m, t)),
    "decode past the boundary": lambda m, t: (decode(m, t, 180), whole(m, t)),
    "chunks of 50": lambda m, t: (chunks(m, t, 50), whole(m, t)),
    "chunks of 64": lambda m, t: (chunks(m, t, 64), whole(m, t)),
    "chunks of 7": lambda m, t: (chunks(m, t, 7), whole(m, t)),
    "static cache": lambda m, t: (static_cache(m, t), whole(m, t)),
    "prefix oracle": lambda m, t: (prefixes(m, t)[0], decode(m, t)[:, list(prefixes(m, t)[1])]),
    "causality": lambda m, t: (whole(m, t)[:, :40], logits(m, t[:, :40])),
    "causality past the boundary": lambda m, t: (whole(m, t)[:, :90], logits(m, t[:, :90])),
    "second call": second_call,
    "left padding": lambda m, t: left_padded(m, t, 150),
    "left padding of a short row": lambda m, t: left_padded(m, t, 40),
    "left padding, decoding": left_padded_decode,
    "crop and continue": crop_and_continue,
    "forked cache": forked,
}


def differences(row, model, tokens):
    got, want = ROWS[row](model, tokens)
    assert got.shape == want.shape
    return (got - want).abs().max().item(), (got.argmax(-1) != want.argmax(-1)).sum().item()
