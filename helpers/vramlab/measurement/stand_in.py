"""Compile the stand-in for CUDA's libraries: every function that PyTorch's wheels link to, most of them doing nothing.

python -m vramlab.measurement.stand_in FOLDER
"""

import re
import subprocess
import sys
import sysconfig
from pathlib import Path

from ..report.data import data_path

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


def functions(library: Path, which: str) -> set[str]:
    """Names that `library` defines or, with "--undefined-only", needs."""
    lines = subprocess.run(["nm", "-D", which, library], check=True, capture_output=True, text=True).stdout
    return {line.split()[-1].split("@")[0] for line in lines.splitlines() if line}


def build(folder: Path) -> list[Path]:
    """The libraries, in `folder`. Needs g++, nm and the wheels nvidia-cuda-runtime and nvidia-cuda-crt."""
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for source, library in SOURCES.items():
        made.append(compiled(folder, source, Path(library).name, functions(NVIDIA / library, "--defined-only")))
    driver = functions(WHEELS / "torch" / "lib" / "libcaffe2_nvrtc.so", "--undefined-only")
    driver = {name for name in driver if re.match(r"cu[A-Z]", name)}
    return [
        *made,
        compiled(folder, "cuda.c", "libcuda.so.1", driver),
        compiled(folder, "nvml.c", "libnvidia-ml.so.1", set()),
    ]


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
    print(*build(Path(sys.argv[1])), sep=":")
