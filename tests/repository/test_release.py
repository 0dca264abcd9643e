"""A release is one tag: one version everywhere, and a workflow that publishes what was checked."""

import hashlib
import re
import tomllib

import conda_recipe
import pytest
import release
import settings
import yaml
from vramlab import __version__


def test_one_version():
    assert release.disagreements(f"v{__version__}") == []


def test_a_tag_of_another_version_is_no_release():
    (wrong,) = release.disagreements("v9.9")
    assert wrong == f"the tag says 9.9, the package {__version__}"


def test_a_version_that_was_left_behind_is_named(tmp_path):
    (tmp_path / "data/base_model").mkdir(parents=True)
    old = '[project]\nversion = "0.0.1"\n'
    (tmp_path / "data/base_model/pyproject.toml").write_text(old)
    (tmp_path / "CHANGELOG.md").write_text("# Changes\n\n## 0.0.2\n\n## 0.0.1\n")
    wrong = release.disagreements(None, tmp_path)
    assert [line.split(",")[0] for line in wrong] == [
        "data/base_model/pyproject.toml says 0.0.1",
        "the first heading of CHANGELOG.md says 0.0.2",
    ]


def test_the_workflow_publishes_what_the_command_checked():
    workflow = (settings.ROOT / ".github/workflows/release.yml").read_text()
    assert 'python tests/tools/release.py --tag "$TAG"' in workflow
    build, publish = workflow.split("  publish:")
    assert "id-token" not in build  # only the job that uploads may ask for the index's token
    assert re.search(r"permissions: \{ id-token: write \}", publish)
    assert "run:" not in publish


def test_the_address_is_written_by_the_command_that_people_have():
    workflow = (settings.ROOT / ".github/workflows/address.yml").read_text()
    assert "tests/tools/repo_url.py" in workflow
    assert "grep -q 'your--account' pyproject.toml" in workflow


def test_conda_forges_recipe_says_what_pyproject_says(tmp_path):
    archive = tmp_path / f"vramlab-{__version__}.tar.gz"
    archive.write_bytes(b"an archive")
    made = yaml.safe_load(conda_recipe.recipe(archive))
    assert made["context"] == {"version": __version__, "python_min": "3.11"}
    assert made["source"]["sha256"] == hashlib.sha256(b"an archive").hexdigest()
    project = tomllib.loads((settings.ROOT / "pyproject.toml").read_text())["project"]
    needed = {line.replace(">", " >", 1) for line in project["dependencies"]}
    assert set(made["requirements"]["run"]) == needed | {"python >=${{ python_min }}"}
    constraints = made["requirements"]["run_constraints"]
    assert {"pytorch >=2.11", "transformers >=5.15", "matplotlib >=3.10"} <= set(constraints)
    assert made["about"]["license"] == "Apache-2.0"
    (entry,) = made["build"]["python"]["entry_points"]
    assert entry == f"vramlab = {project['scripts']['vramlab']}"
    with pytest.raises(ValueError, match="no source distribution of vramlab"):
        conda_recipe.recipe(tmp_path / "vramlab_base_model-0.1.0.tar.gz")
