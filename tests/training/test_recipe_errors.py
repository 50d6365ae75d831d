"""Recipes: what a bad one prints, that shipped ones are good, and that none of it needs torch."""

import subprocess
import sys
from pathlib import Path

import pytest

from ctxext.errors import UsageError
from ctxext.training import estimate
from ctxext.training.recipe import Recipe, is_staged, load_recipe, parallel_sizes
from ctxext.training.run import train

RECIPES = Path(__file__).parents[2] / "recipes"
GOOD = """\
output: out
model: {path: tiny}
method:
  name: yarn
  factor: 8
data:
  sources:
    - path: tiny
  length: 128
positions:
  kind: pose
train:
  steps: 10
  learning_rate: 1e-4
"""


@pytest.fixture
def good(tmp_path):
    path = tmp_path / "good.yaml"
    path.write_text(GOOD)
    return path


# What is changed in the good recipe, and what must be said about it.
BAD = [
    ("trian={}", "trian: unknown key, did you mean 'train'?"),
    ("adapter.alhpa=1", "adapter.alhpa: unknown key, did you mean 'alpha'?"),
    ("method.name=yran", "there is no method 'yran', did you mean 'yarn'?"),
    ("method.beta_fsat=4", "method.beta_fsat: method 'yarn' has no such option, did you mean 'beta_fast'?"),
    ("method.beta_fast=soon", "option 'beta_fast' of method 'yarn' must be float, got 'soon'"),
    ("method.name=longrope", "method: method 'longrope' needs long_factor"),
    ("method.factor=0.5", "method.factor: Input should be greater than or equal to 1"),
    ("method.factor=.inf", "method.factor: Input should be a finite number"),
    ("model.existing=replce", "did you mean 'replace'?"),
    ("data.sources.0.spilt=x", "data.sources.0.spilt: unknown key, did you mean 'split'?"),
    ("data.sources=[]", "data.sources: List should have at least 1 item"),
    ("data.length=8", "data.length: Input should be greater than or equal to 16"),
    ("data.layout=packed", "positions.kind: pose needs one document per block"),
    ("model.attention=flash_attention_2", "model.attention: flash attention cuts pose windows into documents"),
    ("positions.target=100", "positions.target: must be longer than the window of 128 tokens"),
    ("positions.chunks=200", "positions.chunks: a window of 128 tokens can't have so many chunks"),
    ("positions.chunks=1", "positions.chunks: Input should be greater than or equal to 2"),
    ("positions={kind: plain, target: 500}", "positions.target: plain positions have none"),
    ("positions={kind: random, text: skipped}", "positions.text: skipped text is for PoSE chunks"),
    ("method=null", "positions.target: say how far positions go, as there is no method to tell"),
    ("adapter={kind: full, dora: true}", "adapter.dora: has no meaning when all weights are trained"),
    ("train.steps=ten", "train.steps: Input should be a valid integer"),
    ("train.learning_rate=-1", "train.learning_rate: Input should be greater than 0"),
    ("train.offload_activations=true", "train.offload_activations: needs activation_checkpointing: true"),
    ("data.sources.7.path=x", "override 'data.sources.7.path=x': there is no such section"),
    ("output", "override 'output' has no '='"),
]


@pytest.mark.parametrize(("override", "message"), BAD)
def test_each_mistake_is_named(good, override, message):
    with pytest.raises(UsageError) as error:
        load_recipe(good, [override])
    assert message in str(error.value)
    assert error.value.exit_code == 2


def documented():
    """The rows of the table in recipes/README.md."""
    table = (RECIPES / "README.md").read_text().split("| change | says |")[1]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| `")]
    return [(change.strip("`"), message) for change, message in rows]


@pytest.mark.parametrize(("override", "message"), documented())
def test_the_documented_mistakes_print_what_the_table_says(good, override, message):
    with pytest.raises(UsageError) as error:
        load_recipe(good, [override])
    assert message in str(error.value)


def test_all_mistakes_at_once_each_with_its_line(tmp_path):
    path = tmp_path / "bad.yaml"
    text = GOOD.replace("factor: 8", "factor: 8\n  beta_fsat: 4").replace("length: 128", "lenght: 128")
    text = text.replace("steps: 10", "steps: 0\n  offload_activations: true")
    path.write_text(text + "seed: 1\nseed: 2\n")
    with pytest.raises(UsageError) as error:
        load_recipe(path)
    lines = str(error.value).splitlines()
    assert f"{path}:6: method.beta_fsat: method 'yarn' has no such option, did you mean 'beta_fast'?" in lines
    assert f"{path}:10: data.lenght: unknown key, did you mean 'length'?" in lines
    assert f"{path}:7: data.length: Field required" in lines
    assert f"{path}:14: train.steps: Input should be greater than or equal to 1" in lines
    assert f"{path}: line 18: seed is given twice" in lines
    assert len(lines) == 5  # rules across sections wait for the sections to be right


def test_packing_is_guarded_by_the_size_of_its_mask(good):
    change = ["positions.kind=plain", "data.layout=packed", "data.length=32768", "method.factor=200"]
    with pytest.raises(UsageError, match=r"a mask of 1\.0 GiB, 16384 tokens are the limit"):
        load_recipe(good, change)
    load_recipe(good, [*change, "model.attention=flash_attention_2"])
    load_recipe(good, [*change[:2], "data.length=8192"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["method.name=dynamic_ntk"], "method.name: this method needs all keys of a query in one place"),
        (["positions.kind=plain", "data.layout=packed"], "data.layout: context parallel drops the mask"),
        (["data.length=130"], "data.length: must be a multiple of 8"),
        (["model.attention=eager"], "model.attention: context parallel runs with sdpa only"),
    ],
)
def test_combinations_that_context_parallel_gets_wrong(good, monkeypatch, change, message):
    load_recipe(good, change)
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_SIZE", "4")
    with pytest.raises(UsageError) as error:
        load_recipe(good, change)
    assert message in str(error.value)


def test_combinations_that_ulysses_gets_wrong(good, monkeypatch):
    monkeypatch.setenv("PARALLELISM_CONFIG_SP_SIZE", "8")
    with pytest.raises(UsageError, match="Ulysses can pack with flash attention only"):
        load_recipe(good, ["positions.kind=plain", "data.layout=packed"])
    with pytest.raises(UsageError, match="this method needs whole sequences"):
        load_recipe(good, ["method.name=dynamic_pi"])


@pytest.mark.parametrize(
    ("name", "sizes"), [("ddp", (1, 1)), ("fsdp2", (1, 1)), ("context-parallel", (8, 1)), ("ulysses", (1, 8))]
)
def test_launch_files_give_the_environment_that_is_checked(monkeypatch, name, sizes):
    """Parsed by accelerate itself, as its launcher does before it starts anything."""
    launch = pytest.importorskip("accelerate.commands.launch")
    from accelerate.utils.launch import prepare_multi_gpu_env

    path = RECIPES / "accelerate" / f"{name}.yaml"
    assert f"--config_file recipes/accelerate/{name}.yaml" in path.read_text()
    args = launch.launch_command_parser().parse_args(
        ["--config_file", str(path), "-m", "ctxext", "train", "x.yaml"]
    )
    args, _, _ = launch._validate_launch_command(args)
    for key, value in prepare_multi_gpu_env(args).items():
        if key.startswith("PARALLELISM_CONFIG"):
            monkeypatch.setenv(key, value)
    assert parallel_sizes() == sizes


def test_unreadable_files(tmp_path):
    with pytest.raises(UsageError, match="can't read the recipe"):
        load_recipe(tmp_path / "none.yaml")
    (tmp_path / "broken.yaml").write_text("a: [1")
    with pytest.raises(UsageError, match="isn't YAML"):
        load_recipe(tmp_path / "broken.yaml")
    (tmp_path / "empty.yaml").write_text("")
    with pytest.raises(UsageError, match="is no recipe"):
        load_recipe(tmp_path / "empty.yaml")


def test_resolved_recipe_reads_back_equal(good, tmp_path):
    recipe = load_recipe(good, ["method.beta_fast=16", "train.learning_rate=2e-5"])
    assert recipe.method.params == {"beta_fast": 16}
    assert recipe.train.learning_rate == 2e-5
    again = tmp_path / "again.yaml"
    again.write_text(recipe.resolved())
    assert load_recipe(again) == recipe


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda p: p.stem)
def test_shipped_recipes(path):
    if path.stem.startswith("pretrain"):
        pytest.skip("the recipe of another command, tested with it")
    recipe = load_recipe(path)
    header = path.read_text().split("\noutput:")[0]
    assert f"recipes/{path.name}" in header  # the command
    assert recipe.output == f"out/{path.stem}"
    assert estimate.describe(recipe)["tokens"] == recipe.tokens() > 0


def test_staged_methods_are_known():
    from ctxext import methods
    from ctxext.training.recipe import MethodSpec

    staged = {
        n for n, m in methods.all_methods().items() if is_staged(MethodSpec(name=n, factor=2)) and not m.needs
    }
    assert {"dynamic_pi", "dynamic_ntk", "dynamic_yarn"} <= staged
    assert not {"pi", "ntk", "yarn"} & staged


@pytest.mark.parametrize(
    ("method", "staged"),
    [
        ({"name": "longrope", "long_factor": [2.0] * 64, "short_factor": [1.0] * 64}, True),
        ({"name": "longrope", "long_factor": [2.0] * 16, "short_factor": [1.0] * 16}, True),
        ({"name": "longrope", "long_factor": [2.0] * 64}, False),
        ({"name": "self_extend", "factor": 4, "window": 64, "group": 6}, True),
        ({"name": "self_extend", "factor": 4, "window": 64, "group": 4}, True),
        ({"name": "rerope", "window": 6000}, True),
        ({"name": "dual_chunk", "factor": 4, "chunk": 6000, "window": 2000}, True),
        ({"name": "dynamic_ntk", "factor": 8, "granularity": 1}, True),
        ({"name": "theta", "base": 20000.0}, False),
        ({"name": "theta", "base": 5e8}, False),
        ({"name": "nope"}, False),
        ({"name": "yarn", "factor": 1000, "beta_fast": 4}, False),
    ],
)
def test_staged_methods_are_known_by_their_options(method, staged):
    """Whatever size of model the options are for."""
    from ctxext.training.recipe import MethodSpec

    assert is_staged(MethodSpec(**{"factor": 2, **method})) is staged


def test_the_real_schedule_has_the_last_word(good, tmp_path, monkeypatch):
    """If the stand-in rope is deceived, the run is still refused before anything is written."""
    pytest.importorskip("torch")
    from ctxext.training import recipe as rules

    changes = ["method.name=dynamic_ntk", "positions.kind=plain", f"output={tmp_path / 'out'}"]
    monkeypatch.setattr(rules, "is_staged", lambda spec: False)
    cases = {
        "data.layout": [*changes, "data.layout=packed", "model.attention=flash_attention_2"],
        "method.name": changes,
    }
    for where, change in cases.items():
        if where == "method.name":
            monkeypatch.setenv("PARALLELISM_CONFIG_CP_SIZE", "4")
        recipe = load_recipe(good, change)
        with pytest.raises(UsageError, match=where):
            train(recipe)
    assert not (tmp_path / "out").exists()


def test_estimate_counts_what_peft_counts(good):
    """Exactly: 3 layers, LoRA of rank 16, embedding and norms; the numbers are those of a peft model."""
    from ctxext.files import read_config
    from ctxext.folders.source import TINY

    shape = estimate.Shape({**read_config(TINY), "dtype": "bfloat16"})
    assert shape.parameters == 684928
    spec = load_recipe(good, ["adapter={embeddings: true, norms: true}"]).adapter
    assert estimate.trainable_parameters(spec, shape) == 244096


def test_more_text_at_a_time_needs_more_memory(good):
    small, large, packed = (
        estimate.describe(load_recipe(good, changes))["memory_gib"]
        for changes in ([], ["data.length=512"], ["data.layout=packed", "positions.kind=plain"])
    )
    assert large["activations"] == pytest.approx(4 * small["activations"], rel=0.2)
    assert "mask" in packed


def test_checking_a_recipe_imports_no_torch(good):
    code = (
        "import sys; from ctxext.cli import app; from ctxext.training.recipe import load_recipe;"
        f"load_recipe({str(good)!r}); import ctxext.training.estimate;"
        "print(sorted({'torch', 'transformers', 'datasets', 'peft'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_every_field_can_be_overridden(good):
    for section, field in Recipe.model_fields.items():
        assert section in load_recipe(good).model_dump(), field
