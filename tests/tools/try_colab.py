"""Try the set-up cell as Colab meets it: an environment that has torch but not this package, and an empty folder.

The package comes by git from a copy of this working tree. The environment sees what is installed here, as Colab's
comes with its libraries, so nothing large is downloaded; building the package needs pip's usual index.
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
from pathlib import Path

import canonical
import settings

# Runs in the new environment, so that kernels do too; afterwards says where each library was found.
RUN = """import importlib, json, sys
from importlib.util import find_spec
from pathlib import Path
before = find_spec("vramlab")
sys.path.insert(0, sys.argv[2])
import execute
failures = execute.failures([execute.run(Path(sys.argv[1]))])
importlib.invalidate_caches()
specs = {name: find_spec(name) for name in ("vramlab", "torch", "numpy")}
found = {name: spec and list(spec.submodule_search_locations)[0] for name, spec in specs.items()}
print(json.dumps({"before": before is not None, "failures": failures, "found": found}))"""


def publish(root: Path, folder: Path) -> str:
    """Copy the working tree at `root` into a git repository of its own at `folder`; its address."""
    ignored = shutil.ignore_patterns(".git", ".venv", "build", "dist", "*.egg-info", "__pycache__", ".*_cache")
    shutil.copytree(root, folder, ignore=ignored)
    git = ["git", "-C", folder, "-c", "user.name=course", "-c", "user.email=course@example.org"]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "A copy"]):
        subprocess.run([*git, *command], check=True)
    return folder.as_uri().replace("///", "//localhost/", 1)  # some pips take no requirement without a host


def hosted_environment(folder: Path) -> Path:
    """An environment with its own pip that sees every library installed here, and not this package; its interpreter."""
    venv.create(folder, with_pip=True)
    own = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    # Python follows no .pth files from a folder that a .pth file names, and an editable install is nothing else.
    (own / "runtime.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin" / "python"


def try_notebook(path: Path, folder: Path) -> dict:
    """Run the notebook at `path` under the empty `folder` as Colab would: what `RUN` prints, plus `newly` installed."""
    url = publish(settings.ROOT, folder / "repository")
    python = hosted_environment(folder / "environment")
    (folder / "content").mkdir()
    copy = Path(shutil.copy(path, folder / "content"))
    canonical.write(copy, url)
    hosted = {**os.environ, "COLAB_RELEASE_TAG": "release-colab-external"}
    hosted.pop("PYTHONPATH", None)  # it would show the package before the set-up cell has run
    command = [python, "-c", RUN, copy, settings.TOOLS]
    run = subprocess.run(command, cwd=copy.parent, env=hosted, stdout=subprocess.PIPE, text=True, check=True)
    said = json.loads(run.stdout.splitlines()[-1])
    said["newly"] = [name for name, file in said["found"].items() if file and Path(file).is_relative_to(folder)]
    return said


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("notebooks", nargs="*", type=settings.notebook_path, help="else the first chapter")
    paths = parser.parse_args().notebooks or settings.chapters()[:1]
    settings.apply(deterministic=True)
    wrong = []
    for path in paths:
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            said = try_notebook(path, Path(folder))
        new = ", ".join(said["newly"]) or "nothing"
        print(f"{path.name}: {time.monotonic() - start:.0f} s, newly installed: {new}")
        wrong += said["failures"]
        if said["before"] or said["newly"] != ["vramlab"]:
            wrong.append(f"{path.name}: the set-up cell should bring vramlab and nothing else, but {said['found']}")
    print(*wrong, sep="\n", file=sys.stderr)
    return 1 if wrong or not paths else 0


if __name__ == "__main__":
    sys.exit(main())
