"""A release is one tag: one version everywhere, and a workflow that publishes what was checked."""

import re

import release
import settings
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
