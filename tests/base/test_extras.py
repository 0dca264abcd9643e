"""A plain install predicts, plans and has the command line; what needs more names the extra in one
sentence.
"""

import functools
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions

import pytest
from packaging.requirements import Requirement
from settings import ROOT
from vramlab import LoRA, Quantization, Recipe, Sharding, simulate
from vramlab.base.errors import EXTRAS, MissingExtra, needing

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRA = {
    name: {Requirement(line).name for line in lines}
    for name, lines in PROJECT["optional-dependencies"].items()
}
BROUGHT = {
    "numpy": "transformers",
    "safetensors": "transformers",
    "IPython": "jupyterlab",
    "anyio": "mcp",
    "jinja2": "torch",
    "mcp_types": "mcp",
    "triton": "liger-kernel",
}  # by which of the extra's
HIDDEN = """
import sys
for name in {hidden!r}:
    sys.modules[name] = None
import vramlab
{code}
"""


def plainly(code, hidden=tuple(EXTRAS)):
    """What `code` prints where the modules `hidden` are not installed."""
    program = HIDDEN.format(hidden=hidden, code=code)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)


def command(*words):
    return plainly(
        f"import vramlab.__main__\nsys.argv = {['vramlab', *words]!r}\nvramlab.__main__.main()"
    )


def test_predict_and_plan_need_no_extra():
    code = """recipe = vramlab.Recipe("gpt2", lora=vramlab.LoRA(r=8), precision="bf16-mixed")
plan = vramlab.plan("gpt2", "T4", method="lora")
print(vramlab.predict(recipe).peak.total > 0, bool(plan.choices))
print(vramlab.environment_stamp())"""
    done = plainly(code)
    assert done.stderr == "" and done.stdout.startswith("True True\nmachine: ")


@pytest.mark.parametrize(
    "words",
    [
        ["predict", "gpt2"],
        ["explain", "gpt2"],
        ["plan", "gpt2", "--gpu", "T4", "--method", "lora", "--json"],
        ["--help"],
        ["predict", "-h"],
    ],
    ids=" ".join,
)
def test_the_command_line_needs_no_extra(words):
    done = command(*words)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout


def test_the_doctor_says_what_is_missing():
    done = command("doctor")
    assert "Traceback" not in done.stderr
    assert "vramlab[simulate]" in done.stdout


@pytest.mark.parametrize("name", ["simulate", "measure"])
def test_commands_name_their_extra(name):
    done = command(name, "gpt2")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"{name} needs torch: pip install 'vramlab[simulate]'\n"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("vramlab.simulate(recipe)", "simulate needs torch: pip install 'vramlab[simulate]'"),
        ("vramlab.measure(recipe)", "measure needs torch: pip install 'vramlab[simulate]'"),
        (
            "vramlab.explain(vramlab.Recipe('llama-3.2-1b', sharding=vramlab.Sharding(0, 2, "
            "'tensor')))",
            "explain needs torch: pip install 'vramlab[simulate]'",
        ),
        ("vramlab.Recipe('t5-base')", "t5-base needs torch: pip install 'vramlab[simulate]'"),
        ("vramlab.assert_fits(recipe)", "assert_fits needs torch: pip install 'vramlab[simulate]'"),
        ("vramlab.watch", "watch needs torch: pip install 'vramlab[simulate]'"),
        ("vramlab.WatchCallback", "WatchCallback needs torch: pip install 'vramlab[simulate]'"),
        (
            "vramlab.plot.compare(vramlab.predict(recipe), vramlab.predict(recipe))",
            "plot needs matplotlib: pip install 'vramlab[plot]'",
        ),
        (
            "vramlab.Recipe({'model_type': 'foo'})",
            "The model type 'foo' needs transformers: pip install 'vramlab[simulate]'",
        ),
        (
            "vramlab.plan('gpt2', 'T4', method='full').write('train.py')",
            "--write needs transformers: pip install 'vramlab[simulate]'",
        ),
    ],
)
def test_functions_name_their_extra(code, said):
    done = plainly(
        f"recipe = vramlab.Recipe('gpt2')\ntry:\n    {code}\nexcept vramlab.VramLabError as "
        f"error:\n    print(error)"
    )
    assert (done.stdout, done.stderr) == (said + "\n", "")


@pytest.mark.parametrize(
    ("fields", "what", "module", "extra"),
    [
        (
            {"quantization": Quantization("nf4"), "lora": LoRA()},
            "simulate",
            "bitsandbytes",
            "quantization",
        ),
        ({"trainer": "sft"}, "A trainer of TRL", "trl", "trl"),
        (
            {"sharding": Sharding(2, 2, "deepspeed")},
            "sharding.engine='deepspeed'",
            "deepspeed",
            "deepspeed",
        ),
    ],
)
def test_a_simulation_names_its_extra(fields, what, module, extra, monkeypatch):
    pytest.importorskip("torch")
    for name in {module, *(name for name in sys.modules if name.startswith(f"{module}."))}:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtra) as caught:
        simulate(Recipe("gpt2", num_layers=1, **fields))
    assert str(caught.value) == f"{what} needs {module}: pip install 'vramlab[{extra}]'"


def test_other_missing_modules_are_left_alone():
    with pytest.raises(ModuleNotFoundError, match="no_such_module") as caught, needing("this"):
        import no_such_module  # noqa: F401
    assert not isinstance(caught.value, MissingExtra)


owners_of = functools.cache(packages_distributions)


@pytest.mark.parametrize(("module", "extra"), EXTRAS.items())
def test_each_extra_brings_its_modules(module, extra):
    owners = owners_of().get(module) or pytest.skip(f"{module} is not installed here")
    assert {BROUGHT.get(module), *(name.replace("_", "-") for name in owners)} & EXTRA[extra]


def test_the_course_has_what_the_tool_offers():
    assert EXTRA["course"] >= EXTRA["simulate"] | EXTRA["quantization"] | EXTRA["plot"]
