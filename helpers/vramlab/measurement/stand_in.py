"""Compile the stand-in for CUDA's libraries: every function that PyTorch's wheels link to, most of them doing nothing.

    python -m vramlab.measurement.stand_in [FOLDER]

Prints what LD_PRELOAD takes. Needs Linux, g++, PyTorch's CUDA build and NVIDIA's headers for it; no GPU and no driver.
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

from ..hardware.contexts import context_on
from ..hardware.gpu import Gpu
from ..report.data import data_path
from ..report.errors import VramLabError

HERE = data_path("stand_in")
WHEELS = Path(sysconfig.get_path("purelib"))
NVIDIA = WHEELS / "nvidia"
# Each source, and the library of NVIDIA's wheels whose functions it stands in for; the driver's has none.
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
        raise StandInError(f"vramlab run needs Linux, whose LD_PRELOAD puts libraries in place, and this is {system}.")
    version = packages / "torch" / "version.py"
    cuda = version.exists() and re.search(r"^cuda\b[^=\n]*= '(13\.[^']*)'", version.read_text(), re.MULTILINE)
    if not cuda:
        raise StandInError(
            f"vramlab run needs PyTorch's build for CUDA 13, and none is in {packages}: pip install --force-reinstall "
            "torch==2.13.0 from PyPI has it (3 GB; no GPU or driver is needed)."
        )
    if not (packages / "nvidia" / "cu13" / "include" / "crt" / "host_config.h").exists():
        raise StandInError(
            f"vramlab run needs the headers of NVIDIA's compiler: pip install 'nvidia-cuda-crt=={cuda[1]}.*'."
        )
    if lacking := [program for program in ("gcc", "g++", "nm") if not shutil.which(program)]:
        raise StandInError(f"vramlab run needs {' and '.join(lacking)} to build: apt install g++ binutils.")


def libraries() -> list[Path]:
    """Return the libraries of this version in the user's cache, built when they are first asked for."""
    require()
    parts = [*sorted(HERE.glob("*.c*")), Path(__file__), WHEELS / "torch" / "version.py"]
    key = hashlib.sha256(b"".join(part.read_bytes() for part in parts)).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "vramlab")
    folder = cache / f"stand_in-{key}"
    cache.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(f"{folder}.lock"), tempfile.TemporaryDirectory(dir=cache) as part:
        if not folder.exists():
            build(Path(part))
            Path(part).rename(folder)
    return sorted(folder.glob("*.so.*[0-9]"))


def variables(card: Gpu, count: int = 1) -> dict[str, str]:
    """Return the environment that makes the stand-in `count` such cards, whose context takes its share of the memory."""
    said = {
        "NAME": card.name,
        "CAPABILITY": "".join(map(str, card.compute_capability)),
        "MULTIPROCESSORS": card.multiprocessors,
        "BYTES": card.total,
        "CONTEXT": context_on(card).value,
        "COUNT": count,
    }
    visible = ",".join(map(str, range(count)))
    return {f"STAND_IN_{name}": str(value) for name, value in said.items()} | {"CUDA_VISIBLE_DEVICES": visible}


def functions(library: Path, which: str) -> set[str]:
    """Names that `library` defines or, with "--undefined-only", needs."""
    lines = subprocess.run(["nm", "-D", which, library], check=True, capture_output=True, text=True).stdout
    return {line.split()[-1].split("@")[0] for line in lines.splitlines() if line}


def build(folder: Path) -> list[Path]:
    """The libraries, in `folder`. Needs g++, nm and the wheels nvidia-cuda-runtime and nvidia-cuda-crt."""
    folder.mkdir(parents=True, exist_ok=True)
    wanted = {(s, Path(library).name): functions(NVIDIA / library, "--defined-only") for s, library in SOURCES.items()}
    needed = functions(WHEELS / "torch" / "lib" / "libcaffe2_nvrtc.so", "--undefined-only")
    wanted["cuda.c", "libcuda.so.1"] = {name for name in needed if re.match(r"cu[A-Z]", name)}
    wanted["nvml.c", "libnvidia-ml.so.1"] = set()
    return [compiled(folder, *which, names) for which, names in wanted.items()]


def compiled(folder: Path, source: str, name: str, wanted: set[str]) -> Path:
    """One library: the functions of `source`, and for the others that are `wanted` one that says that all is well."""
    written = set(re.findall(r"\b(\w+)\(", (HERE / source).read_text()))
    others = sorted(each for each in wanted - written if re.match(PREFIXES, each))
    rest, out, script = folder / f"{name}.c", folder / name, folder / f"{name}.map"
    rest.write_text("".join(f"int {each}() {{ return 0; }}\n" for each in others))
    script.write_text(f"{name} {{ global: *; }};\n")
    versions = [] if name in ("libcuda.so.1", "libnvidia-ml.so.1") else [f"-Wl,--version-script={script}"]
    include = [f"-I{NVIDIA / each / 'include'}" for each in ("cu13", "cudnn", "nccl")]
    subprocess.run(["gcc", "-O1", "-fPIC", "-w", "-fno-builtin", "-c", rest, "-o", f"{rest}.o"], check=True)
    command = ["g++" if source.endswith("cpp") else "gcc", "-O1", "-shared", "-fPIC", "-w", *include]
    subprocess.run([*command, f"-Wl,-soname,{name}", *versions, HERE / source, f"{rest}.o", "-o", out], check=True)
    return out


if __name__ == "__main__":
    print(*(build(Path(sys.argv[1])) if sys.argv[1:] else libraries()), sep=":")
