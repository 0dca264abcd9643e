# Set-up. On your own machine this cell does nothing. On Colab or Kaggle it installs the course's packages beside
# what is there, and holds torch and numpy at the versions that the runtime came with.
import importlib.metadata
import importlib.util
import os
import subprocess
import sys

REPOSITORY = "https://repository.invalid"
hosted = "COLAB_RELEASE_TAG" in os.environ or "KAGGLE_KERNEL_RUN_TYPE" in os.environ
if hosted and importlib.util.find_spec("vramlab") is None:
    held = [f"{name}=={importlib.metadata.version(name)}" for name in ("torch", "numpy")]
    course = [f"vramlab[course] @ git+{REPOSITORY}", f"git+{REPOSITORY}#subdirectory=data/base_model"]
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", *course, *held], check=True)
    importlib.invalidate_caches()
