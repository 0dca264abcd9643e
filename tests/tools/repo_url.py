"""Write the repository's address where it is needed.

That is pyproject.toml, the README, and every badge and set-up cell.
"""

import re
import sys
from pathlib import Path

import canonical
import settings

ADDRESS = re.compile(r"https://github\.com/[\w.-]+/[\w.-]+")


def change(new: str, root: Path = settings.ROOT) -> list[Path]:
    """Replace the repository's address by `new` under `root`; the files that changed.

    ValueError on a bad one.
    """
    new = new.removesuffix("/").removesuffix(".git")
    if not ADDRESS.fullmatch(new):
        raise ValueError(
            f"the address is {new!r}, but it must read like https://github.com/OWNER/NAME"
        )
    old = settings.repository_url(root)
    owner_name = new.removeprefix("https://github.com/")
    # A badge's target holds owner and name behind Colab's own address, a workflow's step behind
    # "uses".
    address = re.compile(
        r"(github\.com/|/github/|uses: )"
        + re.escape(old.removeprefix("https://github.com/"))
        + r"(?![\w-])"
    )
    changed = []
    for path in (root / "pyproject.toml", root / "README.md", root / "site" / "use.md"):
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        written = address.sub(lambda match: match[1] + owner_name, text)
        if written != text:
            path.write_text(written, encoding="utf-8")
            changed.append(path)
    for path in settings.all_notebooks(root):
        if canonical.write(path, new, root):
            changed.append(path)
    return changed


def main() -> int:
    if len(sys.argv) != 2 or not sys.argv[1]:
        print(
            f"now {settings.repository_url()}; change it by: make repo-url URL=https://github.com/OWNER/NAME"
        )
        return 1
    try:
        print(
            *(f"wrote {path.relative_to(settings.ROOT)}" for path in change(sys.argv[1])), sep="\n"
        )
    except ValueError as error:
        print(f"{error}.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
