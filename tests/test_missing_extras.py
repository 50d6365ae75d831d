"""What a plain install says where an extra is missing, before any work is done."""

import sys

import pytest
from conftest import run

from ctxext.errors import CtxextError, require


@pytest.mark.parametrize(
    ("package", "extra", "args"),
    [
        ("matplotlib", "plot", ("demo", "-o", "out")),
        ("matplotlib", "plot", ("inspect", "tiny", "--plot", "x.png")),
        ("matplotlib", "plot", ("eval", "ppl", "tiny", "--lengths", "256", "--plot", "x.png")),
        ("matplotlib", "plot", ("compare", "tiny", "--methods", "yarn", "--lengths", "256", "-o", "out")),
        ("datasets", "search", ("search", "tiny", "--factor", "2", "--data", "tiny", "-o", "out")),
        ("cma", "search", ("search", "tiny", "--factor", "2", "--data", "tiny", "-o", "out")),
        ("gguf", "gguf", ("export", "tiny", "-o", "x.gguf")),
        ("gguf", "gguf", ("patch", "x.gguf", "--in-gguf", "-m", "yarn")),
    ],
)
def test_commands_name_the_extra(package, extra, args, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, package, None)
    code, out, err = run(monkeypatch, capsys, *args)
    assert (code, out) == (1, "")
    assert package in err
    assert f"pip install 'ctxext[{extra}]'" in err
    assert not list(tmp_path.iterdir())


def test_require():
    require("this", "all", "sys", "json")
    with pytest.raises(CtxextError, match="this needs nowhere_a and nowhere_b"):
        require("this", "all", "nowhere_a", "json", "nowhere_b")
