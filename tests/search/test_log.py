"""The log: whole lines only, the same search only."""

import json

import pytest

from ctxext.errors import CtxextError, UsageError
from ctxext.search.log import Log

SETTINGS = {"factor": 4.0, "seed": 0, "list": (1, 2)}


def filled(path, lines=3):
    log = Log.begin(path, SETTINGS, resume=False)
    for number in range(lines):
        log.write({"factors": [1.0, number + 0.1], "nll": [2.5]})
    return path


def test_replays_what_was_written_then_writes_on(tmp_path):
    log = Log.begin(filled(tmp_path / "a" / "log.jsonl"), SETTINGS, resume=True)
    for number in range(3):
        assert log.replay({"factors": [1.0, number + 0.1]})["nll"] == [2.5]
    assert log.replay({"factors": [9.0]}) is None
    log.write({"factors": [9.0]})
    lines = (tmp_path / "a" / "log.jsonl").read_text().splitlines()
    assert len(lines) == 5
    assert json.loads(lines[-1]) == {"factors": [9.0]}


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_a_line_cut_by_a_kill_is_dropped(tmp_path, cut):
    path = filled(tmp_path / "log.jsonl")
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    log = Log.begin(path, SETTINGS, resume=True)
    assert len(log.records) == 2
    log.write({"factors": [1.0, 2.1], "nll": [2.5]})
    assert path.read_bytes() == whole


def test_refusals(tmp_path):
    path = filled(tmp_path / "log.jsonl")
    with pytest.raises(UsageError, match="--resume"):
        Log.begin(path, SETTINGS, resume=False)
    with pytest.raises(UsageError, match="another seed"):
        Log.begin(path, {**SETTINGS, "seed": 1}, resume=True)
    with pytest.raises(UsageError, match="no search"):
        Log.begin(tmp_path / "none.jsonl", SETTINGS, resume=True)
    with pytest.raises(CtxextError, match="another version"):
        Log.begin(path, SETTINGS, resume=True).replay({"factors": [7.0]})
    for text in ("", "{}\n", '{"a": \n'):
        path.write_text(text)
        with pytest.raises(CtxextError):
            Log.begin(path, SETTINGS, resume=True)


def test_values_that_are_no_numbers_are_never_written(tmp_path):
    log = Log.begin(tmp_path / "log.jsonl", SETTINGS, resume=False)
    with pytest.raises(ValueError, match="JSON"):
        log.write({"nll": [float("nan")]})
