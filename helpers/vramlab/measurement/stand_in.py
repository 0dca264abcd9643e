"""Compile the stand-in for CUDA's libraries.

Every function that PyTorch's wheels link to, most of them doing nothing:

    python -m vramlab.measurement.stand_in [FOLDER]

Prints what LD_PRELOAD takes. Needs Linux, g++, PyTorch's CUDA build and NVIDIA's headers for it; no
GPU and no driver.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import filelock

from ..base.data import data_path
from ..base.errors import VramLabError
from ..hardware.contexts import context_on
from ..hardware.gpu import Gpu

HERE = data_path("stand_in")
WHEELS = Path(sysconfig.get_path("purelib"))
NVIDIA = WHEELS / "nvidia"
# Each source, and the library of NVIDIA's wheels whose functions it stands in for; the driver's has
# none.
SOURCES = {
    "cudart.cpp": "cu13/lib/libcudart.so.13",
    "cublas.c": "cu13/lib/libcublas.so.13",
    "cublasLt.c": "cu13/lib/libcublasLt.so.13",
    "cudnn.c": "cudnn/lib/libcudnn.so.9",
    "cupti.c": "cu13/lib/libcupti.so.13",
    "nccl.c": "nccl/lib/libnccl.so.2",
}
PREFIXES = r"_*cu|p?nccl"


class StandInError(VramLabError, RuntimeError):
    """A part is missing that the stand-in is made of; the message says what to install."""


def require(system: str = sys.platform, packages: Path = WHEELS) -> None:
    """Raise StandInError, which says what to install, unless the stand-in can be built here."""
    if system != "linux":
        rest = "whose LD_PRELOAD puts libraries in place"
        raise StandInError(f"vramlab run needs Linux, {rest}, and this is {system}.")
    cuda = _cuda_of(packages / "torch" / "version.py")
    if not cuda:
        missing = f"PyTorch's build for CUDA 13, and none is in {packages}"
        command = "pip install --force-reinstall torch==2.13.0 from PyPI has it"
        size = "3 GB; no GPU or driver is needed"
        raise StandInError(f"vramlab run needs {missing}: {command} ({size}).")
    headers = packages / "nvidia" / "cu13" / "include" / "crt" / "host_config.h"
    if not headers.exists():
        command = f"pip install 'nvidia-cuda-crt=={cuda}.*'"
        raise StandInError(f"vramlab run needs the headers of NVIDIA's compiler: {command}.")
    lacking = [program for program in ("gcc", "g++", "nm") if not shutil.which(program)]
    if lacking:
        programs = " and ".join(lacking)
        raise StandInError(f"vramlab run needs {programs} to build: apt install g++ binutils.")


def _cuda_of(version: Path) -> str:
    """Return the CUDA 13 that a torch is built for, by its version.py; "" for any other."""
    if not version.exists():
        return ""
    line = re.search(r"^cuda\b[^=\n]*= '(13\.[^']*)'", version.read_text(), re.MULTILINE)
    return line[1] if line else ""


def libraries() -> list[Path]:
    """Return the libraries of this version in the user's cache.

    They are built when they are first asked for.
    """
    require()
    # Whoever changes a source or PyTorch gets other libraries, and the old ones stay.
    parts = [*sorted(HERE.glob("*.c*")), Path(__file__), WHEELS / "torch" / "version.py"]
    key = hashlib.sha256(b"".join(part.read_bytes() for part in parts)).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "vramlab")
    # By what it is built from, so that an old build is never taken for a new one.
    folder = cache / f"stand_in-{key}"
    cache.mkdir(parents=True, exist_ok=True)
    # Another process that builds the same is waited for.
    with filelock.FileLock(f"{folder}.lock"), tempfile.TemporaryDirectory(dir=cache) as part:
        if not folder.exists():
            build(Path(part))
            # At once, so that nobody finds a folder with half of its libraries.
            Path(part).rename(folder)
    return sorted(folder.glob("*.so.*[0-9]"))


def variables(
    card: Gpu,
    count: int = 1,
) -> dict[str, str]:
    """Return the environment that makes the stand-in `count` such cards.

    The context takes its share of their memory.
    """
    return {
        "STAND_IN_NAME": card.name,
        "STAND_IN_CAPABILITY": "".join(map(str, card.compute_capability)),
        "STAND_IN_MULTIPROCESSORS": str(card.multiprocessors),
        "STAND_IN_BYTES": str(card.total),
        "STAND_IN_CONTEXT": str(context_on(card).value),
        "STAND_IN_COUNT": str(count),
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(count))),
    }


def functions(library: Path, which: str) -> set[str]:
    """Return the names that `library` defines or, with "--undefined-only", needs."""
    command: list[str | Path] = ["nm", "-D", which, library]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    # A line ends with the name, and the version of its library behind an @.
    names = [line.split()[-1] for line in result.stdout.splitlines() if line]
    return {name.partition("@")[0] for name in names}


def build(folder: Path) -> list[Path]:
    """Build the libraries in `folder`, and return them.

    Needs g++, nm and the wheels nvidia-cuda-runtime and nvidia-cuda-crt.
    """
    folder.mkdir(parents=True, exist_ok=True)
    built = []
    for source, library in SOURCES.items():
        wanted = functions(NVIDIA / library, "--defined-only")
        built.append(compiled(folder, source, Path(library).name, wanted))
    # The driver's library is in no wheel; torch says what it needs of it.
    needed = functions(WHEELS / "torch" / "lib" / "libcaffe2_nvrtc.so", "--undefined-only")
    wanted = {name for name in needed if re.match(r"cu[A-Z]", name)}
    built.append(compiled(folder, "cuda.c", "libcuda.so.1", wanted))
    built.append(compiled(folder, "nvml.c", "libnvidia-ml.so.1", set()))
    return built


def compiled(
    folder: Path,
    source: str,
    name: str,
    wanted: set[str],
) -> Path:
    """Compile one library.

    It has the functions of `source`, and for the others that are `wanted` one that says that all is
    well.
    """
    # Names before a parenthesis are the source's own functions, and those that it calls.
    written = set(re.findall(r"\b(\w+)\(", (HERE / source).read_text()))
    # Of all that PyTorch links to only NVIDIA's names are made up here.
    others = sorted(each for each in wanted - written if re.match(PREFIXES, each))
    rest = folder / f"{name}.c"
    rest.write_text("".join(f"int {each}() {{ return 0; }}\n" for each in others))
    # NVIDIA's functions have their library's name as version, and torch asks for that.
    script = folder / f"{name}.map"
    script.write_text(f"{name} {{ global: *; }};\n")
    options = [f"-Wl,-soname,{name}"]
    if name not in ("libcuda.so.1", "libnvidia-ml.so.1"):
        options.append(f"-Wl,--version-script={script}")
    options += [f"-I{NVIDIA / each / 'include'}" for each in ("cu13", "cudnn", "nccl")]
    object_file = f"{rest}.o"
    subprocess.run(
        ["gcc", "-O1", "-fPIC", "-w", "-fno-builtin", "-c", rest, "-o", object_file],
        check=True,
    )
    compiler = "g++" if source.endswith("cpp") else "gcc"
    library = folder / name
    command = [compiler, "-O1", "-shared", "-fPIC", "-w", *options]
    subprocess.run([*command, HERE / source, object_file, "-o", library], check=True)
    return library


if __name__ == "__main__":
    made = build(Path(sys.argv[1])) if sys.argv[1:] else libraries()
    print(*made, sep=":")
