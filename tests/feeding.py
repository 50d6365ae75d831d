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


# ---------------------------------------------------------------- holes


def positions_of(mask):
    return (mask.cumsum(1) - 1).clamp(min=0)


def fed(model, ids, mask, ends, cache=None, start=0, positions=None):
    """Columns up to each of `ends` fed into a cache, and all in one forward without; of seen tokens only."""
    positions = positions_of(mask) if positions is None else positions
    with torch.no_grad():
        want = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
        got = []
        for end in ends:
            part = slice(start, end)
            seen, given = mask[:, :end], positions[:, part]
            out = model(ids[:, part], attention_mask=seen, position_ids=given, cache=cache, use_cache=True)
            cache, start = out.cache, end
            got.append(out.logits)
    got = torch.cat(got, 1)
    seen = mask[:, start - got.shape[1] : start].bool()
    return got[seen], want[:, start - got.shape[1] : start][seen]


def batch_of(tokens, count):
    return torch.cat([tokens.roll(7 * i, 1) for i in range(count)])


def holed(tokens):
    """Three rows: a long hole, a row that starts late, and a single masked token."""
    ids = batch_of(tokens, 3)
    mask = torch.ones_like(ids)
    mask[0, 30:80] = 0
    mask[1, :25] = 0
    mask[2, 110:111] = 0
    return ids, mask


def holes_static(model, tokens):
    from transformers import StaticCache

    ids, mask = holed(tokens)
    return fed(model, ids, mask, [70, 71, 150, 200], StaticCache(config=model.config, max_cache_len=224))


def gaps(model, tokens):
    """A token far behind the one before it: its distance counts, not its place in the cache."""
    ids = tokens[:, :120]
    positions = torch.arange(120)[None].clone()
    positions[:, 50:] += 30
    positions[:, 101:] += 40
    return fed(model, ids, torch.ones_like(ids), [70, 71, 110, 120], positions=positions)


def ragged_suffixes(model, tokens):
    """transformers' recipe: prefill once, batch_repeat_interleave, left-padded suffixes of several lengths."""
    from transformers import DynamicCache

    ids = torch.cat((tokens[:, :90].expand(3, -1), batch_of(tokens[:, 90:], 3)), 1)
    mask = torch.ones_like(ids)
    mask[0, 90:102] = 0
    mask[2, 90:123] = 0
    with torch.no_grad():
        cache = model(ids[:1, :90], use_cache=True, cache=DynamicCache(config=model.config)).cache
    cache.batch_repeat_interleave(3)
    return fed(model, ids, mask, [130, 131, 200], cache, 90)


def chosen_rows(model, tokens):
    """Rows chosen from a cache with holes, and their ends taken back."""
    ids, mask = holed(tokens)
    with torch.no_grad():
        part = mask[:, :120]
        out = model(ids[:, :120], attention_mask=part, position_ids=positions_of(part), use_cache=True)
    out.cache.crop(-10)
    chosen = torch.tensor([1, 0])
    out.cache.batch_select_indices(chosen)
    return fed(model, ids[chosen], mask[chosen], [111, 160, 200], copy.deepcopy(out.cache), 110)


def draft_tree(model, tokens):
    """Two branches of three tokens in one call, each sees the prompt and itself; then the first one goes on."""
    ids = tokens[:, :106]
    own = torch.ones(6, 6, dtype=torch.bool).tril() & torch.block_diag(*[torch.ones(3, 3)] * 2).bool()
    tree = torch.cat((torch.ones(6, 100, dtype=torch.bool), own), 1)[None, None]
    positions = torch.tensor([[100, 101, 102] * 2])
    with torch.no_grad():
        cache = model(ids[:, :100], use_cache=True).cache
        out = model(ids[:, 100:], attention_mask=tree, position_ids=positions, cache=cache, use_cache=True)
        cache.crop(-3)
        rest = model(tokens[:, 120:], cache=cache, use_cache=True).logits
    taken = torch.cat((ids[:, :103], tokens[:, 120:]), 1)
    other = torch.cat((ids[:, :100], ids[:, 103:]), 1)
    want = logits(model, taken)[:, 100:103], logits(model, other)[:, 100:], logits(model, taken)[:, 103:]
    return torch.cat((out.logits, rest), 1), torch.cat(want, 1)


HOLES = {
    "holes": lambda m, t: fed(m, *holed(t), [100, 101, 102, 150, 200]),
    "holes, decoding": lambda m, t: fed(m, *holed(t), [80, *range(81, 130)]),
    "holes, static cache": holes_static,
    "position gaps": gaps,
    "ragged suffixes of a prefix": ragged_suffixes,
    "turns of a batch": lambda m, t: fed(m, *holed(t), [40, 90, 95, 140, 141, 200]),
    "chosen rows": chosen_rows,
    "draft tree": draft_tree,
}
"""Positions that are not the places in the cache."""

# ---------------------------------------------------------------- tokens that see later ones


def as_float(mask):
    return torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)


def prefix_mask(length, prefix):
    """The first tokens see each other, those after them all that was before."""
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    mask[:, :prefix] |= torch.arange(length)[:, None] < prefix
    return mask[None, None]


def not_causal(model, tokens):
    """A model told so, beside a mask that shows everything."""
    ids, told = tokens[:, :80], copy.deepcopy(model)
    told.config.is_causal = False
    for layer in told.model.layers:
        layer.self_attn.is_causal = False
    with torch.no_grad():
        everything = torch.ones(1, 1, 80, 80, dtype=torch.bool)
        return told(ids).logits, model(ids, attention_mask=everything).logits


def bidirectional_mask(model, tokens):
    ids, everything = tokens[:, :80], torch.ones(1, 1, 80, 80, dtype=torch.bool)
    with torch.no_grad():
        return model(ids, attention_mask=everything).logits, model(ids, attention_mask=as_float(everything)).logits


def prefix_masks(model, tokens, cached):
    """The two kinds of mask; or a part of the prefix first, causal, and then the rest."""
    ids, mask = tokens[:, :80], prefix_mask(80, 72)
    with torch.no_grad():
        want = model(ids, attention_mask=as_float(mask), use_cache=False).logits
        if not cached:
            return model(ids, attention_mask=mask, use_cache=False).logits, want
        first = model(ids[:, :40], use_cache=True)
        out = model(ids[:, 40:], attention_mask=mask[:, :, 40:], cache=first.cache, use_cache=True)
        mask[:, :, :40] = prefix_mask(80, 0)[:, :, :40]
        return out.logits, model(ids, attention_mask=mask, use_cache=False).logits[:, 40:]


NOT_CAUSAL = {
    "is_causal=False": not_causal,
    "bidirectional mask": bidirectional_mask,
    "prefix mask": lambda m, t: prefix_masks(m, t, cached=False),
    "prefix mask, cached": lambda m, t: prefix_masks(m, t, cached=True),
}
"""What staged methods and those that change attention must refuse."""

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
    got, want = {**ROWS, **HOLES, **NOT_CAUSAL}[row](model, tokens)
    assert got.shape == want.shape
    return (got - want).abs().max().item(), (got.argmax(-1) != want.argmax(-1)).sum().item()
