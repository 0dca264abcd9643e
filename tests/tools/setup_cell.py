# Set-up. On your own machine this cell does nothing. On Colab or Kaggle it installs the
# course's packages and keeps the versions of torch and numpy that are there.
import importlib.metadata
import importlib.util
import os
import subprocess
import sys

REPOSITORY = "https://repository.invalid"
hosted = "COLAB_RELEASE_TAG" in os.environ or "KAGGLE_KERNEL_RUN_TYPE" in os.environ
if hosted and importlib.util.find_spec("vramlab") is None:
    if "--" in REPOSITORY.split("/")[3]:  # no account on GitHub has such a name
        raise SystemExit("Write the account that holds this course into REPOSITORY above.")
    held = [f"{name}=={importlib.metadata.version(name)}" for name in ("torch", "numpy")]
    course = [
        f"vramlab[course] @ git+{REPOSITORY}",
        f"git+{REPOSITORY}#subdirectory=data/base_model",
    ]
    pip = [sys.executable, "-m", "pip"]
    subprocess.run([*pip, "install", "-q", *course, *held], check=True)
    # PEFT refuses adapters beside a torchao as old as Colab's. Nothing here uses it.
    subprocess.run([*pip, "uninstall", "-qqy", "torchao"], check=True)
    importlib.invalidate_caches()
    if "pyarrow" in sys.modules:  # pandas loads it; this Python still has the old one
        raise SystemExit("All is installed. Restart the session, then run from the top.")
