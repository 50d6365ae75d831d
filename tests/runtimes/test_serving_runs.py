"""What `portability` says of a folder against what the runtime made of it, for every folder that was run."""

import ast
from pathlib import Path

import pytest

from ctxext.files import read_config, read_json
from ctxext.runtimes.facts import read_classes, runtime
from ctxext.runtimes.portability import portability
from experiments.serving import families, run
from experiments.serving.models import CONTROL, jobs

RESULTS = Path(run.__file__).parents[1] / "results"
RUNS = read_json(RESULTS / "serving_runs.json")


@pytest.fixture(scope="module")
def configs(tmp_path_factory):
    """By target, the config.json of every folder that a runtime with this target is given."""
    made = {}

    def of(target):
        if target not in made:
            found = jobs(tmp_path_factory.mktemp("models"), target)
            made[target] = {(j.family, j.method, j.target): read_config(j.folder) for j in found}
        return made[target]

    return of


@pytest.mark.parametrize("name", RUNS)
def test_every_verdict_agrees_with_the_run(name, configs):
    found = RUNS[name]
    known = runtime(found["runtime"])
    assert (known.version, known.date) == (found["version"], found["date"])
    folders = configs(known.target or "all")
    assert {(r["family"], r["method"], r["target"]) for r in found["rows"]} <= folders.keys()
    wrong = []
    for row in found["rows"]:
        case = (row["family"], row["method"], row["target"])
        verdict = next(v for v in portability(folders[case]) if v.runtime == known.name)
        said = (verdict.runs, verdict.evidence)
        if row["runs"] == "not run":
            if said[1] == "run":
                wrong.append((case, said, "wasn't run"))
        elif said != (row["runs"], "run"):
            wrong.append((case, said, row))
    assert wrong == []


@pytest.mark.parametrize("name", RUNS)
def test_a_run_says_something_only_beside_an_exact_control(name):
    """The unpatched model runs exactly wherever anything is said; a staged folder runs nowhere."""
    rows = RUNS[name]["rows"]
    controls = {r["family"]: r["runs"] for r in rows if r["method"] == CONTROL}
    assert "exact" in controls.values()
    for row in rows:
        assert row["runs"] == "not run" or controls[row["family"]] == "exact"
        if row["method"] in ("dynamic_yarn", "rerope"):
            assert row["runs"] in ("refused", "not run")


def test_the_markdown_is_made_from_the_rows():
    assert (RESULTS / "serving_runs.md").read_text() == run.markdown(RUNS)


SGLANG = {
    "llama": """
from sglang.srt.layers.rotary_embedding import get_rope
class Attention:
    def __init__(self, scaling):
        self.rope = get_rope(1, 1, 1, 1, True, scaling)
class LlamaForCausalLM:
    def __init__(self):
        self.layer = Attention(None)
EntryClass = [LlamaForCausalLM]
""",
    "mistral": "from sglang.srt.models.llama import LlamaForCausalLM\n"
    "class MistralForCausalLM(LlamaForCausalLM): pass\nEntryClass = MistralForCausalLM\n",
    "gemma": "class GemmaForCausalLM:\n    def __init__(self):\n"
    "        self.rope = get_rope(1, rope_scaling=None)\nEntryClass = [GemmaForCausalLM]\n",
    "olmo2": "class Olmo2ForCausalLM:\n    def __init__(self, c):\n"
    "        self.a, self.b = get_rope(1), get_rope(1, rope_scaling=c)\nEntryClass = Olmo2ForCausalLM\n",
    "qwen2": "class Qwen2ForCausalLM:\n    pass\nEntryClass = Qwen2ForCausalLM\n",
}


def test_classes_are_told_apart_by_what_they_give_to_their_rope(tmp_path):
    """By position, by name, through a base class of another file; None and a missing one are no scaling."""
    for file, text in SGLANG.items():
        path = tmp_path / families.SOURCES["sglang"].models / f"{file}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    found = families.derived("sglang", tmp_path)
    assert {"llama", "mistral"} <= set(found["scaled"])
    assert (found["unscaled"], found["mixed"]) == (["gemma"], ["olmo2"])
    assert "qwen2" not in {family for value in found.values() for family in value}


@pytest.mark.parametrize(
    ("given", "passes"),
    [
        ("{**config.rope_parameters, 'rope_theta': 1}", "scaled"),
        ("{'rope_type': 'default', 'rope_theta': theta}", "unscaled"),
        ("{'rope_type': 'yarn', 'factor': config.factor}", "mixed"),
        ("config.rope_parameters if full else None", "scaled"),
    ],
)
def test_a_scaling_written_out_in_the_call(given, passes):
    [statement] = ast.parse(f"get_rope(1, rope_parameters={given})").body
    assert families._given(statement.value, 3, "rope_parameters") == passes


def test_families_are_in_one_list_each_and_of_the_version_that_the_facts_name():
    for name, found in read_classes().items():
        lists = [family for value in found.values() if isinstance(value, list) for family in value]
        assert len(lists) == len(set(lists))
        assert runtime(name).version == found["version"]
