"""The "ctxext" block of a config.json: what older and newer versions wrote."""

import pytest

from ctxext import methods
from ctxext.config.block import block, digest, read_block
from ctxext.errors import CtxextError, UsageError
from ctxext.rope import Rope

ROPE = Rope(1e4, 8, 64)


def test_the_digest_of_tables_and_stages_is_that_of_the_first_version():
    """Folders of frequency methods and staged ones, written before encodings had a field of their own, load."""
    assert digest(methods.schedule(ROPE, "yarn", 4)) == "a84ae474564ff04b"
    assert digest(methods.schedule(ROPE, "dynamic_ntk", 4)) == "43e7152f213c92f9"
    assert digest(methods.schedule(ROPE, "drope", 4)) == "687b3f0a55230a3c"


def test_an_option_that_is_gone_and_was_off():
    data = block(methods.schedule(ROPE, "drope", 4))
    assert read_block({**data, "params": {"temperature": 0.0, "qk_norm": False}}).method == "drope"
    with pytest.raises(UsageError, match="no option 'qk_norm'"):
        read_block({**data, "params": {"temperature": 0.0, "qk_norm": True}})


def test_another_schedule_under_the_same_name_is_refused():
    data = block(methods.schedule(ROPE, "yarn", 4))
    with pytest.raises(CtxextError, match="another schedule"):
        read_block({**data, "params": {**data["params"], "attention_factor": 1.0}})
