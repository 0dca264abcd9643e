"""Libraries outside the tested range are named: older ones told from missing ones, newer ones from
broken ones.
"""

import sys

import pytest
from vramlab.base import versions
from vramlab.base.errors import MissingExtra, UntestedVersion, needing
from vramlab.base.versions import VersionRange, untested, version_ranges, version_trouble

TORCH = VersionRange("torch", "2.11", "2.15.0")


@pytest.fixture
def having(monkeypatch):
    """Pretend that libraries are installed in other versions."""

    def pretend(**others):
        real = versions.installed
        named = {name.replace("_", "-"): version for name, version in others.items()}
        monkeypatch.setattr(versions, "installed", lambda name: named.get(name) or real(name))

    return pretend


def newer(name):
    """A version of the next line but one."""
    major, minor, *_ = version_ranges()[name].newest.split(".")
    return f"{major}.{int(minor) + 2}.0"


@pytest.mark.parametrize(
    ("version", "trouble"),
    [
        ("2.10.1", "torch 2.10.1 is older than 2.11, the oldest that works"),
        ("2.11.0+cu130", ""),
        ("2.15.0", ""),
        ("2.15.3", ""),  # a patch release of a tested line
        ("2.16.0.dev20261101", "torch 2.16.0.dev20261101 is newer than 2.15.0, the newest tested"),
        ("3.0", "torch 3.0 is newer than 2.15.0, the newest tested"),
    ],
)
def test_the_range(version, trouble):
    assert TORCH.trouble(version) == trouble


def test_what_is_installed_here_is_tested():
    assert untested() == {} and version_trouble() == ""


def test_an_old_version_is_told_from_a_missing_package(having, monkeypatch):
    having(transformers="4.57.1")
    with pytest.raises(UntestedVersion) as caught, needing("simulate"):
        raise ModuleNotFoundError(
            "No module named 'transformers.integrations.moe'", name="transformers.integrations.moe"
        )
    assert str(caught.value) == (
        "simulate needs newer libraries; transformers 4.57.1 is older than 5.15, the oldest that "
        "works: "
        "pip install --upgrade 'transformers>=5.15'"
    )
    with pytest.raises(UntestedVersion, match="older than"), needing("simulate"):
        raise AttributeError("type object 'Trainer' has no attribute '_thing'")
    monkeypatch.setitem(sys.modules, "trl", None)
    with pytest.raises(MissingExtra, match="simulate needs trl: pip install"), needing("simulate"):
        raise ModuleNotFoundError("No module named 'trl'", name="trl")


def test_an_import_that_fails_from_a_newer_version_names_it(having):
    version = newer("torch")
    having(torch=version)
    with pytest.raises(UntestedVersion) as caught, needing("simulate"):
        raise ImportError("cannot import name '_x' from 'torch._C'", name="torch._C")
    newest = version_ranges()["torch"].newest
    assert (
        f"(cannot import name '_x' from 'torch._C'); torch {version} is newer than {newest}"
        in str(caught.value)
    )
    assert str(caught.value).endswith(f"pip install 'torch<={newest}'")


def test_an_import_that_trl_reports_in_its_own_way(having):
    """Its lazy modules raise a RuntimeError from what an import raised, as pyarrow's for an old
    NumPy.
    """
    having(numpy="1.26.0")
    with (
        pytest.raises(UntestedVersion, match=r"pip install --upgrade 'numpy>=2\.0'"),
        needing("A trainer of TRL"),
    ):
        raise RuntimeError("Failed to import") from ImportError(
            "pyarrow requires NumPy 2.0 or newer, found 1.26.0"
        )


@pytest.mark.parametrize(
    "error",
    [
        AttributeError("x"),
        ImportError("of the user's", name="my_module"),
        RuntimeError("CUDA error"),
    ],
)
def test_another_error_is_left_alone(having, error):
    having(torch=newer("torch"))
    with pytest.raises(type(error)) as caught, needing("simulate"):
        raise error
    assert caught.value is error


def test_a_simulation_that_fails_names_untested_versions(having):
    torch = pytest.importorskip("torch")
    from vramlab import simulate

    class Broken(torch.nn.Module):
        def forward(self, x):
            raise RuntimeError("no such kernel")

    model = Broken()
    model.weight = torch.nn.Parameter(torch.ones(2))

    def message():
        with pytest.raises(ValueError, match="no such kernel") as caught:
            simulate(
                model=model,
                batch=torch.ones(2),
                optimizer=torch.optim.SGD,
                loss=lambda y, _: y.sum(),
            )
        return str(caught.value)

    assert "tested" not in message()
    having(torch=newer("torch"))
    assert f"torch {newer('torch')} is newer than" in message()
