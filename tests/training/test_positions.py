"""Training positions: every one occurs, chunks stay in order, and attention sees the whole window."""

import itertools
import random

import pytest
import torch
from conftest import pico_model
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxext import apply, methods
from ctxext.rope import Rope
from ctxext.training.positions import Chunk, draw, flatten, pose
from ctxext.training.recipe import PositionSpec
from ctxext.training.sequences import Blocks, Windows, collate, make_item


@given(st.data(), st.integers(4, 64), st.integers(2, 4), st.integers(0, 2**32))
@settings(max_examples=200, deadline=None)
def test_chunks_are_ordered_and_inside_the_target(data, length, chunks, seed):
    target = data.draw(st.integers(length + 1, 8 * length))
    made = pose(random.Random(seed), length, target, chunks)
    positions = flatten(made)
    assert len(made) == chunks
    assert all(chunk.size >= 1 for chunk in made)
    assert len(positions) == length
    assert positions[0] == 0
    assert all(a < b for a, b in itertools.pairwise(positions))
    assert positions[-1] < target


@pytest.mark.parametrize(
    "spec",
    [PositionSpec(kind="pose"), PositionSpec(kind="pose", chunks=4), PositionSpec(kind="random")],
    ids=["2 chunks", "4 chunks", "random"],
)
def test_every_position_and_every_distance_occurs(spec):
    length, target = 16, 64
    seen, distances = set(), set()
    for seed in range(4000):
        positions = flatten(draw(spec, random.Random(seed), length, target))
        seen.update(positions)
        distances.update(positions[-1] - p for p in positions)
    assert seen == set(range(target))
    assert distances == set(range(target))


def test_plain_share_keeps_some_windows_as_they_are():
    spec = PositionSpec(kind="pose", plain_share=0.25)
    plain = sum(draw(spec, random.Random(s), 8, 32) == [Chunk(0, 8)] for s in range(2000))
    assert 0.2 < plain / 2000 < 0.3


ROWS = [{"input_ids": list(range(i, i + 8)), "starts": [0], "filled": 8} for i in (3, 20, 40)]


def test_positions_are_redrawn_every_time_round_and_repeat_with_the_seed():
    spec = PositionSpec(kind="pose")
    items = Blocks(ROWS, Windows(spec, 8, 1000, 7), 12)
    again = Blocks(ROWS, Windows(spec, 8, 1000, 7), 12)
    assert [items[k] for k in (5, 0, 11)] == [again[k] for k in (5, 0, 11)]  # whatever came before
    for epoch in range(4):  # every epoch has every block, of one document each
        blocks = [items[k]["input_ids"] for k in range(3 * epoch, 3 * epoch + 3)]
        assert sorted(blocks) == [row["input_ids"] for row in ROWS]
    positions = {tuple(items[k]["position_ids"]) for k in range(12)}
    assert len(positions) == 12


def test_skipped_text_is_as_far_off_as_its_positions():
    row = {"input_ids": list(range(100, 164)), "starts": [0], "filled": 64}
    item = make_item(
        row, PositionSpec(kind="pose", text="skipped", target=64), random.Random(3), length=16, target=64
    )
    assert item["input_ids"] == [100 + p for p in item["position_ids"]]
    jump = next(i for i in range(1, 16) if item["position_ids"][i] != item["position_ids"][i - 1] + 1)
    assert item["labels"][jump] == -100
    assert [a for i, a in enumerate(item["labels"]) if i != jump] == [
        a for i, a in enumerate(item["input_ids"]) if i != jump
    ]


def test_batches_mix_rows_with_and_without_positions():
    batch = collate(
        [
            {"input_ids": [1, 2], "labels": [1, 2]},
            {"input_ids": [3, 4], "labels": [-100, 4], "position_ids": [0, 0]},
        ]
    )
    assert batch["position_ids"].tolist() == [[0, 1], [0, 0]]
    assert "attention_mask" not in batch


@pytest.mark.parametrize("method", ["pi", "yarn", "dynamic_ntk"])
def test_a_skipped_window_is_read_whole(method):
    """The first token reaches the last row's logits across the skip, as positions say, and only with the mask."""
    model = pico_model()
    apply(model, methods.schedule(Rope(10000.0, 32, 64), method, 4))
    row = {"input_ids": list(range(3, 51)), "starts": [0], "filled": 48}
    item = make_item(row, PositionSpec(kind="pose"), random.Random(0), length=48, target=256)
    batch = collate([item])
    batch.pop("labels")
    changed = {**batch, "input_ids": batch["input_ids"].clone()}
    changed["input_ids"][0, 0] = 99

    def last(inputs, **more):
        with torch.no_grad():
            return model(**{**inputs, **more}, use_cache=False).logits[0, -1]

    assert (last(batch) - last(changed)).abs().max() > 1e-3
    if method != "dynamic_ntk":  # without the mask transformers cuts at the skip: the trap this is about
        assert torch.equal(last(batch, attention_mask=None), last(changed, attention_mask=None))
    # A cached forward that is given the same positions, token by token, is an independent reference.
    if method != "dynamic_ntk":
        from transformers import DynamicCache

        cache, out = DynamicCache(), None
        for i in range(48):
            with torch.no_grad():
                out = model(
                    input_ids=batch["input_ids"][:, i : i + 1],
                    position_ids=batch["position_ids"][:, i : i + 1],
                    attention_mask=torch.ones(1, i + 1, dtype=torch.long),
                    cache=cache,
                    use_cache=True,
                ).logits[0, -1]
        assert torch.allclose(out, last(batch), atol=2e-5)


def test_rows_with_different_skips_share_a_staged_batch():
    """Rows in different stages at the same index: the loss and its gradients are those of each row alone."""
    model = pico_model()
    apply(model, methods.schedule(Rope(10000.0, 32, 64), "dynamic_yarn", 4))
    row = {"input_ids": list(range(3, 51)), "starts": [0], "filled": 48}
    items = [make_item(row, PositionSpec(kind="pose"), random.Random(s), length=48, target=256) for s in range(3)]
    weight = model.model.layers[0].self_attn.k_proj.weight

    def run(part):
        model.zero_grad()
        out = model(**collate(part), use_cache=False).loss
        out.backward()
        return out.detach(), weight.grad.clone()

    together, gradient = run(items)
    alone = [run([item]) for item in items]
    assert torch.allclose(together, torch.stack([value for value, _ in alone]).mean(), atol=1e-6)
    assert torch.allclose(gradient, torch.stack([g for _, g in alone]).mean(0), atol=1e-6)
