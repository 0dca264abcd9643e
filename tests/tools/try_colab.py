"""Try the set-up cell as Colab meets it.

That is an environment that has torch but not this package, and an empty folder.

The package comes by git from a copy of this working tree. The environment sees what is installed
here, as Colab's comes with its libraries, so nothing large is downloaded; building the package
needs pip's usual index. With --prefix it is a copy of an installation of Python that has Colab's
own versions and no virtual environment (`pip install -r tests/tools/colab.txt` into a Python 3.13
of its own); with --card the notebook runs as on that GPU (`try_cuda.py`).
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from collections.abc import Mapping
from pathlib import Path

import canonical
import settings
import try_cuda

# Runs in the new environment, so that kernels do too; afterwards says where each library was found,
# and which others changed.
RUN = """import importlib, importlib.metadata, json, sys
import ipykernel.kernelbase
from importlib.util import find_spec
from pathlib import Path
def look():
    specs = {name: find_spec(name) for name in ("vramlab", "torch", "numpy")}
    return {name: spec and list(spec.submodule_search_locations)[0] for name, spec in specs.items()}
def versions():
    installed = reversed(list(importlib.metadata.distributions()))  # of two the first counts
    return {each.name.lower().replace("_", "-"): each.version for each in installed}
before, old = look(), versions()
sys.path.insert(0, sys.argv[2])
import execute
failures = execute.failures([execute.run(Path(sys.argv[1]))])
importlib.invalidate_caches()
after, new = look(), versions()
newly = [name for name in after if (after[name], new.get(name)) != (before[name], old.get(name))]
others = [name for name in sorted(new) if new[name] != old.get(name)]
changed = [f"{name} {old.get(name, 'none')} to {new[name]}" for name in others]
owners = importlib.metadata.packages_distributions()
loaded = set()
for module in sys.modules:
    loaded.update(each.lower().replace("_", "-") for each in owners.get(module, ()))
# under a kernel, too
replaced = sorted(name for name in loaded & old.keys() if old[name] != new.get(name))
said = {"before": bool(before["vramlab"]), "failures": failures, "found": after, "newly": newly}
said |= {"changed": changed, "replaced": replaced}
print(json.dumps(said))"""


def publish(root: Path, folder: Path) -> str:
    """Copy the working tree at `root` into a git repository of its own at `folder`; its address."""
    ignored = shutil.ignore_patterns(
        ".git", ".venv", "build", "dist", "*.egg-info", "__pycache__", ".*_cache"
    )
    shutil.copytree(root, folder, ignore=ignored)
    # git commits nothing without a name, and a fresh machine has none set.
    git = ["git", "-C", folder, "-c", "user.name=course", "-c", "user.email=course@example.org"]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "A copy"]):
        subprocess.run([*git, *command], check=True)
    return folder.as_uri().replace(
        "///", "//localhost/", 1
    )  # some pips take no requirement without a host


def hosted_environment(folder: Path, prefix: Path | None = None) -> Path:
    """An environment with its own pip that has every library installed here, or in `prefix`.

    Return its interpreter.
    """
    if prefix:
        shutil.copytree(
            prefix, folder, symlinks=True, copy_function=os.link
        )  # pip replaces files, it does not change them
        return folder / "bin" / "python3"
    venv.create(folder, with_pip=True)
    own = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    # Python follows no .pth files from a folder that a .pth file names, and an editable install is
    # nothing else.
    (own / "runtime.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin" / "python"


def try_notebook(
    path: Path, folder: Path, prefix: Path | None = None, gpu: Mapping[str, str] = {}
) -> dict:
    """Run the notebook at `path` under the empty `folder` as Colab would; `gpu`: what makes a card.

    What `RUN` prints.
    """
    url = publish(settings.ROOT, folder / "repository")
    python = hosted_environment(folder / "environment", prefix)
    (folder / "content").mkdir()
    copy = Path(shutil.copy(path, folder / "content"))
    # The set-up cell installs from the address in it, so the copy gets that of the repository
    # above.
    canonical.write(copy, url)
    hosted = {**os.environ, "COLAB_RELEASE_TAG": "release-colab-external", **gpu}
    hosted.pop("PYTHONPATH", None)  # it would show the package before the set-up cell has run
    hosted.pop("PYTHONSTARTUP", None)  # the gate's check of recipes would import the package
    command = [python, "-W", "ignore::DeprecationWarning", "-c", RUN, copy, settings.TOOLS]
    run = subprocess.run(
        command, cwd=copy.parent, env=hosted, stdout=subprocess.PIPE, text=True, check=True
    )
    # The notebook's progress bar and pip may have printed before it.
    return json.loads(run.stdout.splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "notebooks", nargs="*", type=settings.notebook_path, help="else the first chapter"
    )
    parser.add_argument(
        "--prefix", type=Path, help="an installation of Python with Colab's versions"
    )
    parser.add_argument("--card", help="run as on this GPU, such as T4")
    given = parser.parse_args()
    paths = given.notebooks or settings.chapters()[:1]
    settings.apply(deterministic=True)
    gpu = try_cuda.surroundings(given.card) if given.card else {}
    beside = None
    if given.prefix:  # hard links need one file system
        (beside := settings.ROOT / "build").mkdir(exist_ok=True)
    wrong = []
    for path in paths:
        start = time.monotonic()
        with tempfile.TemporaryDirectory(dir=beside) as folder:
            said = try_notebook(path, Path(folder), given.prefix, gpu)
        new = ", ".join(said["newly"]) or "nothing"
        print(
            f"{path.name}: {time.monotonic() - start:.0f} s, newly installed: {new}",
            *said["changed"],
            sep="\n  ",
        )
        wrong += said["failures"]
        if said["before"] or said["newly"] != ["vramlab"]:
            wrong.append(
                f"{path.name}: the set-up cell should bring vramlab and nothing else, but "
                f"{said['found']}"
            )
        if said["replaced"]:
            wrong.append(
                f"{path.name}: the set-up cell replaced what a kernel has loaded: "
                f"{', '.join(said['replaced'])}"
            )
    print(*wrong, sep="\n", file=sys.stderr)
    return 1 if wrong or not paths else 0


if __name__ == "__main__":
    sys.exit(main())
