"""One address for badges, set-up cells, pyproject.toml and README; one command changes it."""

import canonical
import pytest
import repo_url
import settings
from scratch import URL

STEP = f"uses: {URL.removeprefix('https://github.com/')}/action@main"


def test_repo_url_writes_everywhere(tmp_path, good):
    (tmp_path / "notebooks" / "solutions").mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text(f'[project.urls]\nRepository = "{URL}"\n')
    (tmp_path / "README.md").write_text(
        canonical.badge(URL, "notebooks/99_scratch.ipynb") + f"\n{URL}-fork {URL}.\n{STEP}\n"
    )
    names = (
        "notebooks/99_scratch.ipynb",
        "notebooks/solutions/99_scratch.ipynb",
        "notebooks/calculator.ipynb",
    )
    for name in names:
        (tmp_path / name).write_text(good)
    new = "https://github.com/else/where"
    assert len(repo_url.change(new + ".git", tmp_path)) == 5
    assert settings.repository_url(tmp_path) == new
    assert (tmp_path / "README.md").read_text() == (
        canonical.badge(new, "notebooks/99_scratch.ipynb")
        + f"\n{URL}-fork {new}.\nuses: else/where/action@main\n"
    )
    for name in names:
        text = (tmp_path / name).read_text()
        assert (
            URL not in text
            and canonical.badge(new, name) in text
            and f'REPOSITORY = \\"{new}\\"' in text
        )
    assert repo_url.change(new, tmp_path) == []


@pytest.mark.parametrize(
    "address", ["", "github.com/a/b", "https://github.com/a", "https://example.org/a/b", "x'; y"]
)
def test_repo_url_refuses_other_addresses(address, tmp_path):
    with pytest.raises(ValueError, match="must read like https://github"):
        repo_url.change(address, tmp_path)
