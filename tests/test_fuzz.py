"""Conversations at random: one model, one cache, whatever may happen to both, against forwards without a cache.

The suite runs a few that are always the same. `CTXEXT_FUZZ=5000 pytest tests/test_fuzz.py --timeout 0 -s` runs so
many others, by `--hypothesis-seed` if it is given, and counts the operations.
"""

import copy
import functools
import os
import pickle
from collections import Counter

import pytest
import torch
from conftest import pico_model
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

import ctxext
from ctxext.errors import CtxextError

EXAMPLES = int(os.environ.get("CTXEXT_FUZZ", "0"))
TRAINED, LIMIT, ROWS, TOLERANCE = 32, 150, 4, 5e-5
# The first of a name is the method.
SCHEDULES = {
    "unpatched": None,
    "yarn": {},
    "ntk": {},
    "nope": {},
    "dynamic_pi": {"granularity": 8},
    "dynamic_ntk": {"granularity": 8},
    "dynamic_yarn": {"granularity": 16, "temperature": 0.2},
    "longrope": {"short_factor": [1.0] * 8, "long_factor": [1 + i / 3 for i in range(8)]},
    "longrope from token 4": {"long_factor": [1 + i / 3 for i in range(8)], "start_tokens": 4},
    "alibi": {},
    "t5_bias": {"buckets": 16, "max_distance": 60},
    "sinusoidal": {"scale": 0.5},
    "nope in layers": {"every": 2},
    "drope": {"temperature": 0.3},
    "self_extend": {"window": 8, "group": 8},
    "rerope": {"window": 12},
    "rerope leaky": {"window": 12, "step": 8},
    "dual_chunk": {"chunk": 20, "window": 5},
}
DONE = Counter()


def fresh():
    return pico_model(
        hidden_size=64,
        head_dim=16,
        intermediate_size=96,
        num_hidden_layers=2,
        max_position_embeddings=TRAINED,
        initializer_range=0.2,
        eos_token_id=None,
    )


def put(model, name):
    """Make a model run one of SCHEDULES, whatever it ran before; what is learned gets equal values each time."""
    options = SCHEDULES[name]
    if options is None:
        if ctxext.schedule_of(model):
            ctxext.unpatch(model)
        return model
    ctxext.patch(model, name.split()[0], 4, **options)
    for key, parameter in model.named_parameters():
        if "ctxext_" in key:
            with torch.no_grad():
                parameter.normal_(generator=torch.Generator().manual_seed(3))
    return model


@functools.cache
def oracle(name):
    """A model that nothing happens to."""
    return put(fresh(), name)


@functools.cache
def is_static(name):
    """Whether nothing tells the cache of such a model from that of another one."""
    schedule = ctxext.schedule_of(oracle(name))
    return schedule is None or schedule.is_static


rows = st.lists(st.integers(0, ROWS - 1), min_size=ROWS, max_size=ROWS)
spans = st.lists(st.tuples(st.integers(0, 30), st.sampled_from([0, 0, 0, 1, 5, 20])), min_size=ROWS, max_size=ROWS)
counts = st.one_of(st.just(1), st.integers(1, 12), st.integers(1, 60))
names = st.sampled_from(list(SCHEDULES))


class Conversation(RuleBasedStateMachine):
    """ids, mask, positions: (rows, tokens), all that the model was given. next: (rows,), the next positions.

    filler: whom the cache was filled by, None if it is empty. gaps: positions aren't what a mask says.
    """

    @initialize(name=names, batch=st.integers(1, 3), fixed=st.booleans())
    def begin(self, name, batch, fixed):
        self.model, self.name, self.backend = put(fresh(), name), name, "sdpa"
        self.generator = torch.Generator().manual_seed(0)
        self.start_anew(batch, fixed)

    @rule(batch=st.integers(1, 3), fixed=st.booleans())
    def start_anew(self, batch, fixed):
        from transformers import DynamicCache, StaticCache

        self.fixed, config = fixed, self.model.config
        self.cache = StaticCache(config=config, max_cache_len=LIMIT) if fixed else DynamicCache(config=config)
        self.filler, self.gaps = None, False
        self.ids = self.mask = self.positions = torch.zeros(batch, 0, dtype=torch.long)
        self.next = torch.zeros(batch, 1, dtype=torch.long)
        DONE["start anew"] += 1

    def length(self):
        return self.ids.shape[1]

    def stale(self):
        return self.filler not in (None, self.name)

    def usable(self):
        """Nothing is said of a cache that goes from one static schedule to another."""
        return not (self.stale() and is_static(self.filler) and is_static(self.name))

    def take(self, ids, mask, jumps):
        """Add columns to what was given."""
        told = self.next + jumps * (mask.cumsum(1) > 0) + mask.cumsum(1) - 1
        self.ids, self.mask = torch.cat((self.ids, ids), 1), torch.cat((self.mask, mask), 1)
        self.positions = torch.cat((self.positions, told.clamp(min=0)), 1)
        self.next = told[:, -1:] + 1

    def compare(self, got):
        """Logits of the last tokens against a forward without a cache."""
        with torch.no_grad():
            want = oracle(self.name)(
                self.ids, attention_mask=self.mask, position_ids=self.positions, use_cache=False
            ).logits[:, -got.shape[1] :]
        seen = self.mask[:, -got.shape[1] :].bool()
        assert seen.sum() == 0 or (got - want)[seen].abs().max() < TOLERANCE

    def call(self, columns):
        part = slice(-columns, None)
        with torch.no_grad():
            return self.model(
                self.ids[:, part],
                attention_mask=self.mask,
                position_ids=self.positions[:, part],
                cache=self.cache,
                use_cache=True,
            ).logits

    def feed(self, count, holes, jumps):
        batch, count = self.ids.shape[0], min(count, LIMIT - self.length())
        ids = torch.randint(3, 128, (batch, count), generator=self.generator)
        mask = torch.ones_like(ids)
        for row, (start, width) in enumerate(holes[:batch]):
            mask[row, start : start + width] = 0
        before = self.ids, self.mask, self.positions, self.next
        self.take(ids, mask, jumps)
        if self.stale():
            with pytest.raises(CtxextError, match="filled before the model was patched"):
                self.call(count)
            self.ids, self.mask, self.positions, self.next = before
            assert int(self.cache.get_seq_length()) == self.length()
            DONE["refused"] += 1
            return
        self.filler = self.name
        self.compare(self.call(count))
        DONE["feed"] += 1

    def room(self, count=1):
        return self.usable() and self.length() + count <= LIMIT

    @precondition(lambda self: self.room())
    @rule(count=counts)
    def prefill(self, count):
        self.feed(count, [], 0)

    @precondition(lambda self: self.room())
    @rule(count=counts, holes=spans)
    def prefill_with_holes(self, count, holes):
        """Pads before, between and after tokens: ragged suffixes, rows that ended early."""
        self.feed(count, holes, 0)

    @precondition(lambda self: self.room())
    @rule(count=counts, jumps=rows)
    def prefill_after_a_gap(self, count, jumps):
        self.gaps = self.gaps or not self.stale()
        self.feed(count, [], 3 * torch.tensor(jumps[: self.ids.shape[0]])[:, None])

    @precondition(lambda self: self.room())
    @rule(steps=st.integers(1, 10))
    def decode(self, steps):
        for _ in range(min(steps, LIMIT - self.length())):
            self.feed(1, [], 0)

    @precondition(lambda self: self.room(8) and not self.gaps and not self.stale())
    @rule(prompt=st.integers(1, 4))
    def generate(self, prompt):
        ids = torch.randint(3, 128, (self.ids.shape[0], prompt), generator=self.generator)
        self.take(ids, torch.ones_like(ids), 0)
        out = self.model.generate(
            self.ids,
            attention_mask=self.mask,
            cache=self.cache,
            max_new_tokens=4,
            do_sample=False,
            disable_compile=True,
            output_logits=True,
            return_dict_in_generate=True,
        )
        new = out.sequences[:, self.length() : -1]
        self.take(new, torch.ones_like(new), 0)
        self.filler = self.name
        self.compare(torch.stack(out.logits, 1))
        DONE["generate"] += 1

    # ------------------------------------------------------------ the cache

    @precondition(lambda self: self.length())
    @rule(share=st.integers(1, 10))
    def crop(self, share):
        count = -(-self.length() * share // 10)
        self.cache.crop(-count)
        last = self.positions[:, -count:][:, :1]
        # The position that the first removed token had, if it wasn't a pad, which has that of the token before.
        masked = self.mask[:, -count:][:, :1] == 0
        self.next = torch.where(masked & (self.mask[:, :-count].sum(1, keepdim=True) > 0), last + 1, last)
        self.ids, self.mask, self.positions = (x[:, :-count] for x in (self.ids, self.mask, self.positions))
        if not self.length():
            self.filler, self.gaps, self.next = None, False, torch.zeros_like(self.next)
        DONE["crop"] += 1

    def choose(self, chosen):
        self.ids, self.mask, self.positions, self.next = (
            x[chosen] for x in (self.ids, self.mask, self.positions, self.next)
        )

    @precondition(lambda self: self.length())
    @rule(chosen=rows)
    def reorder(self, chosen):
        chosen = torch.tensor(chosen[: self.ids.shape[0]]) % self.ids.shape[0]
        self.cache.reorder_cache(chosen)
        self.choose(chosen)
        DONE["reorder"] += 1

    @precondition(lambda self: self.length() and not self.fixed)
    @rule(chosen=rows, count=st.integers(1, ROWS))
    def select(self, chosen, count):
        chosen = torch.tensor(chosen[:count]) % self.ids.shape[0]
        self.cache.batch_select_indices(chosen)
        self.choose(chosen)
        DONE["select"] += 1

    @precondition(lambda self: self.length() and not self.fixed and 2 * self.ids.shape[0] <= ROWS)
    @rule()
    def repeat(self):
        self.cache.batch_repeat_interleave(2)
        self.choose(torch.arange(self.ids.shape[0]).repeat_interleave(2))
        DONE["repeat"] += 1

    @precondition(lambda self: self.length())
    @rule()
    def pickled_cache(self):
        self.cache = pickle.loads(pickle.dumps(self.cache))
        DONE["pickled cache"] += 1

    @precondition(lambda self: self.room() and not self.stale())
    @rule(count=counts)
    def forked_cache(self, count):
        """The first of two equal caches goes another way."""
        kept = copy.deepcopy(self.cache), self.ids, self.mask, self.positions, self.next, self.filler
        self.feed(count, [], 0)
        self.cache, self.ids, self.mask, self.positions, self.next, self.filler = kept
        DONE["forked cache"] += 1

    @precondition(lambda self: self.length())
    @rule()
    def reset(self):
        self.cache.reset()
        self.filler, self.gaps = None, False
        self.ids, self.mask, self.positions = (x[:, :0] for x in (self.ids, self.mask, self.positions))
        self.next = torch.zeros_like(self.next)
        DONE["reset"] += 1

    # ------------------------------------------------------------ the model

    @rule(name=names)
    def patch(self, name):
        put(self.model, name)
        self.name = name
        DONE["patch"] += 1

    @rule()
    def unpatch(self):
        self.patch("unpatched")

    @rule(backend=st.sampled_from(["eager", "sdpa"]))
    def set_backend(self, backend):
        self.model.set_attn_implementation(backend)
        self.backend = backend
        DONE["backend"] += 1

    @rule(how=st.sampled_from(["deepcopy", "pickle"]))
    def copied_model(self, how):
        self.model = copy.deepcopy(self.model) if how == "deepcopy" else pickle.loads(pickle.dumps(self.model))
        DONE["copied model"] += 1

    @precondition(lambda self: self.usable() and not self.stale())
    @rule(count=counts)
    def saved_and_loaded_model(self, count):
        """The loaded model goes on with the cache of the saved one."""
        if self.length() >= LIMIT:
            return
        import tempfile

        kept = self.model
        with tempfile.TemporaryDirectory() as folder:
            self.model.save_pretrained(folder)
            self.model = ctxext.load(folder, dtype=torch.float32, attn_implementation=self.backend).eval()
        self.feed(count, [], 0)
        self.model = kept
        DONE["saved and loaded"] += 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_conversations_at_random():
    run_state_machine_as_test(
        Conversation,
        settings=settings(
            max_examples=EXAMPLES or 80,
            stateful_step_count=20,
            derandomize=not EXAMPLES,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    print(sum(DONE.values()), "operations:", dict(DONE))
    assert DONE["feed"] > DONE["refused"] > 0
