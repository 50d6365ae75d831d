"""Files of text, whoever reads them: in any locale, with a byte order mark, and when they aren't UTF-8."""

import ast
import codecs
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import run

import ctxext
from ctxext.errors import CtxextError
from ctxext.files import read_config
from ctxext.folders.source import TINY
from ctxext.text import check_utf8, load_texts

ROOT = Path(__file__).parent.parent
WORDS = "Größe und Maß, naïve café, 漢字. "


def without_encoding(source):
    """Lines of calls that open a file of text, or a program's output as text, without saying its encoding."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        whose = getattr(node.func, "value", None)
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        # Ours (`files.write_text`, which others import by that name), and `os.open`, which opens no text.
        if isinstance(whose, ast.Name) and whose.id in ("files", "os"):
            continue
        said = {keyword.arg: keyword.value for keyword in node.keywords}
        modes = [*node.args, *([said["mode"]] if "mode" in said else [])]
        binary = any(isinstance(m, ast.Constant) and isinstance(m.value, str) and "b" in m.value for m in modes)
        reads = name in ("read_text", "write_text") and whose is not None
        opens = name == "open" and not binary
        runs = name in ("run", "Popen", "check_output") and ("text" in said or "universal_newlines" in said)
        if (reads or opens or runs) and "encoding" not in said:
            yield node.lineno


@pytest.mark.parametrize("folder", ["ctxext", "experiments"])
def test_every_file_of_text_says_its_encoding(folder):
    found = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        lines = path.read_text(encoding="utf-8")
        found += [f"{path.relative_to(ROOT)}:{line}" for line in without_encoding(lines)]
    assert not found


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("open('a')", True),
        ("path.open()", True),
        ("path.open('w')", True),
        ("path.read_text()", True),
        ("path.write_text('a')", True),
        ("subprocess.run(line, text=True)", True),
        ("open('a', 'rb')", False),
        ("path.open(mode='wb')", False),
        ("path.open(encoding='utf-8')", False),
        ("files.write_text(path, 'a')", False),
        ("subprocess.run(line)", False),
    ],
)
def test_what_that_test_finds(source, found):
    assert bool(list(without_encoding(source))) == found


@pytest.fixture
def folder(tmp_path):
    """A copy of `tiny` with words in its JSON files and its card."""
    out = tmp_path / "model"
    shutil.copytree(TINY, out)
    for name in ("config.json", "tokenizer_config.json", "generation_config.json"):
        path = out / name
        data = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        path.write_text(json.dumps(data | {"remark": WORDS}, ensure_ascii=False), encoding="utf-8")
    (out / "generation_config.json").write_text(
        json.dumps({"max_length": 20, "remark": WORDS}, ensure_ascii=False)
    )
    (out / "README.md").write_text(f"---\nlicense: mit\n---\n# {WORDS}\n", encoding="utf-8")
    return out


def mark(path):
    path.write_bytes(codecs.BOM_UTF8 + path.read_bytes())
    return path


def recipe(path, model, text):
    path.write_text(
        f"# {WORDS}\noutput: {path.parent / 'run'}\nmodel: {{path: {model}}}\nmethod: {{name: yarn, factor: 2}}\n"
        f"data: {{sources: [{{path: {text}}}], length: 32, cache: {path.parent / 'cache'}}}\n"
        "train: {steps: 1, learning_rate: 0.001}\n",
        encoding="utf-8",
    )
    return path


def test_an_ascii_locale(folder, tmp_path):
    """Whole commands in one process that reads and writes ASCII where nothing else is said."""
    text = tmp_path / "text.txt"
    text.write_text(WORDS * 200, encoding="utf-8")
    made = recipe(tmp_path / "recipe.yaml", folder, text)

    def escaped(word):
        """As the words of a real command come in that locale."""
        return str(word).encode().decode("ascii", "surrogateescape")

    commands = [
        ["patch", folder, "-m", "yarn", "-o", tmp_path / "out"],
        ["patch", folder, "-m", "yarn", "-o", tmp_path / "größe"],
        ["inspect", folder],
        ["portability", folder],
        ["doctor", tmp_path / "out"],
        ["push", tmp_path / "out", "me/it", "--dry-run"],
        ["push", folder, "me/it", "--dry-run"],
        ["eval", "ppl", folder, "--data", text, "--lengths", "64", "-o", tmp_path / "o.json", "--json"],
        ["train", made, "--dry-run"],
        ["export", folder, "-o", tmp_path / "o.gguf"],
    ]
    script = f"""
import sys
from ctxext.cli.app import main
assert open({str(text)!r}).encoding.lower() not in ("utf-8", "utf8"), "the locale isn't what is tested"
for command in {[[escaped(word) for word in command] for command in commands]!a}:
    sys.argv = ["ctxext", *command]
    try:
        main()
    except SystemExit as stop:
        assert not stop.code, (command, stop.code)
"""
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    path = tmp_path / "script.py"
    path.write_text(script, encoding="utf-8")
    ran = subprocess.run([sys.executable, path], env=environment, capture_output=True, encoding="utf-8")
    assert ran.returncode == 0, ran.stderr[-2000:]
    for out in ("out", "größe"):
        config = json.loads((tmp_path / out / "config.json").read_text(encoding="utf-8"))
        assert config["remark"] == WORDS
        assert WORDS in (tmp_path / out / "README.base.md").read_text(encoding="utf-8")
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["remark"] == WORDS


@pytest.mark.parametrize("method", ["yarn", "dynamic_ntk"])
def test_marks_in_the_files_of_a_model(method, folder, tmp_path):
    """The patched folder is as if there were none. transformers can't read the source, and that is said."""
    from transformers import AutoTokenizer

    names = ("config.json", "tokenizer_config.json", "generation_config.json", "README.md")
    plain = ctxext.patch_checkpoint(folder, tmp_path / "plain", method=method, factor=2).out
    for name in names:
        mark(folder / name)
    assert read_config(folder)["remark"] == WORDS
    for name in ("config.json", "generation_config.json"):
        with pytest.raises(CtxextError, match=f"{name} begins with a byte order mark"):
            ctxext.load(folder)
        (folder / name).write_bytes((folder / name).read_bytes().removeprefix(codecs.BOM_UTF8))
    ctxext.load(folder)
    for name in ("config.json", "generation_config.json"):
        mark(folder / name)
    out = ctxext.patch_checkpoint(folder, tmp_path / "out", method=method, factor=2).out
    assert json.loads((out / "generation_config.json").read_text(encoding="utf-8"))["remark"] == WORDS
    for name in names[:3]:
        assert (out / name).read_bytes() == (plain / name).read_bytes()
    ctxext.load(out)
    AutoTokenizer.from_pretrained(out)


def test_a_mark_in_an_index(tmp_path, llama_folder):
    from conftest import pico_model

    pico_model().save_pretrained(tmp_path / "m", max_shard_size="100KB")
    mark(tmp_path / "m" / "model.safetensors.index.json")
    out = ctxext.patch_checkpoint(tmp_path / "m", tmp_path / "out", method="yarn", factor=2).out
    assert len(list(out.glob("*.safetensors"))) > 2


def test_marks_in_what_a_user_writes(folder, tmp_path, monkeypatch, capsys):
    text = tmp_path / "text.txt"
    text.write_text(WORDS * 200, encoding="utf-8")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": WORDS * 200}) + "\n")
    (tmp_path / "factors.json").write_text(json.dumps([1 + i / 4 for i in range(16)]))
    (tmp_path / "suite.yaml").write_text("documents: 1\n")
    for name in ("text.txt", "rows.jsonl", "factors.json", "suite.yaml"):
        mark(tmp_path / name)
    mark(recipe(tmp_path / "recipe.yaml", folder, text))
    assert load_texts(text)[0].text == load_texts(tmp_path / "rows.jsonl")[0].text == WORDS * 200
    ppl = ["eval", "ppl", "tiny", "--data", text, "--lengths", "64"]
    settings = ["-m", "longrope", "--set", f"long_factor=@{tmp_path / 'factors.json'}"]
    compare = ["compare", "tiny", "--data", tmp_path / "rows.jsonl", "--lengths", "128", "--methods", "pi"]
    for command in (
        ["train", tmp_path / "recipe.yaml", "--dry-run"],
        [*compare, "--suite", tmp_path / "suite.yaml", "-o", tmp_path / "report"],
        ["patch", "tiny", *settings, "-o", tmp_path / "long"],
        [*ppl, "-o", tmp_path / "before.json"],
    ):
        code, _, err = run(monkeypatch, capsys, *command)
        assert code == 0, (command, err)
    mark(tmp_path / "before.json")
    code, _, err = run(monkeypatch, capsys, *ppl, "--against", tmp_path / "before.json")
    assert code == 0, err


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("suffix", [".txt", ".jsonl"])
def test_training_reads_a_marked_file_and_names_one_in_another_encoding(streaming, suffix, tmp_path):
    pytest.importorskip("datasets")
    from ctxext.training.data import read_source
    from ctxext.training.recipe import DataSpec, Source

    def rows(data):
        path = tmp_path / f"data{suffix}"
        path.write_bytes(data)
        spec = DataSpec(
            sources=[Source(path=str(path))], length=16, streaming=streaming, cache=str(tmp_path / "c")
        )
        return [row["text"] for row in read_source(spec.sources[0], spec)]

    text = WORDS if suffix == ".txt" else json.dumps({"text": WORDS}, ensure_ascii=False) + "\n"
    assert rows(codecs.BOM_UTF8 + text.encode()) == [WORDS]
    for other in ("utf-16", "cp1252"):
        words = text if other == "utf-16" else text.replace("漢字", "")
        with pytest.raises(CtxextError, match=rf"data{suffix} isn't UTF-8 text \(byte \d+\)"):
            rows(words.encode(other))


def test_a_byte_far_inside(tmp_path):
    """Told with its place, also where a character lies across two pieces of the file."""
    path = tmp_path / "long.txt"
    whole = ("x" * ((1 << 20) - 1) + "ö").encode()
    path.write_bytes(whole)
    check_utf8(path)
    path.write_bytes(whole + b"\xff")
    check_utf8(path, size=1 << 20)
    with pytest.raises(CtxextError, match=rf"byte {len(whole)}\)"):
        check_utf8(path)


@pytest.mark.parametrize(
    "command",
    [
        ("eval", "ppl", "tiny", "--data", "TEXT", "--lengths", "64"),
        ("compare", "tiny", "--data", "TEXT", "--lengths", "128"),
        ("search", "tiny", "--data", "TEXT"),
        ("fit-temperature", "tiny", "--data", "TEXT"),
        ("train", "RECIPE"),
        ("train", "LATIN", "--dry-run"),
        ("compare", "tiny", "--data", "TEXT", "--suite", "LATIN"),
        ("patch", "tiny", "-m", "longrope", "--set", "long_factor=@LATIN"),
        ("inspect", "MODEL"),
        ("doctor", "MODEL"),
        ("patch", "MODEL", "-m", "yarn"),
    ],
    ids=" ".join,
)
def test_other_encodings_are_a_clear_error(command, folder, tmp_path, monkeypatch, capsys):
    (tmp_path / "text.txt").write_bytes(("Größe " * 500).encode("latin-1"))
    (tmp_path / "latin.yaml").write_bytes("# Größe\n".encode("latin-1"))
    made = recipe(tmp_path / "recipe.yaml", "tiny", tmp_path / "text.txt")
    (folder / "config.json").write_bytes(b'{"model_type": "Gr\xf6\xdfe"}')
    monkeypatch.chdir(tmp_path)
    names = {"TEXT": "text.txt", "LATIN": "latin.yaml", "RECIPE": str(made), "MODEL": str(folder)}
    for key, value in names.items():
        command = tuple(word.replace(key, value) for word in command)
    code, _, err = run(monkeypatch, capsys, *command)
    assert code in (1, 2)
    assert "UTF-8" in err or "utf-8" in err
    assert "Traceback" not in err
    assert any(name in err for name in ("text.txt", "latin.yaml", "config.json"))


def test_names_of_a_locale_are_spelled_in_what_is_written(tmp_path):
    """An ASCII locale hands over a name's bytes as escapes; files get the name itself."""
    from ctxext.files import dumps, spelled, write_text

    escaped = "größe".encode().decode("ascii", "surrogateescape")
    assert spelled(escaped) == "größe"
    assert spelled("größe") == "größe"
    assert json.loads(dumps({"name": escaped})) == {"name": "größe"}
    assert write_text(tmp_path / "a.md", escaped).read_text(encoding="utf-8") == "größe"
    assert dumps("größe", ascii=True).isascii()
