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
NVIDIA = Path(sysconfig.get_path("purelib"), "nvidia", "cu13")
SOURCES = {"cudart.cpp": "libcudart.so.13", "cublas.c": "libcublas.so.13", "cublasLt.c": "libcublasLt.so.13"}


def functions(library: Path, which: str) -> set[str]:
    """Names that `library` defines or, with "--undefined-only", needs."""
    lines = subprocess.run(["nm", "-D", which, library], check=True, capture_output=True, text=True).stdout
    return {line.split()[-1].split("@")[0] for line in lines.splitlines() if line}


def build(folder: Path) -> list[Path]:
    """The libraries, in `folder`. Needs g++, nm and the wheels nvidia-cuda-runtime and nvidia-cuda-crt."""
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for source, name in SOURCES.items():
        made.append(compiled(folder, source, name, functions(NVIDIA / "lib" / name, "--defined-only"), name))
    torch = Path(sysconfig.get_path("purelib"), "torch", "lib", "libcaffe2_nvrtc.so")
    driver = {name for name in functions(torch, "--undefined-only") if re.match(r"cu[A-Z]", name)}
    return [*made, compiled(folder, "cuda.c", "libcuda.so.1", driver, None)]


def compiled(folder: Path, source: str, name: str, wanted: set[str], version: str | None) -> Path:
    """One library: the functions of `source`, and for the others that are `wanted` one that says that all is well."""
    written = set(re.findall(r"\b(_*cu\w+)\(", (HERE / source).read_text()))
    others = sorted(each for each in wanted - written if re.match(r"_*cu", each))
    rest, out, script = folder / f"{name}.c", folder / name, folder / f"{name}.map"
    rest.write_text("".join(f"int {each}() {{ return 0; }}\n" for each in others))
    script.write_text(f"{name} {{ global: *; }};\n")
    flags = [f"-Wl,--version-script={script}"] if version else []
    include = f"-I{NVIDIA / 'include'}"
    subprocess.run(["gcc", "-O1", "-fPIC", "-w", "-fno-builtin", "-c", rest, "-o", f"{rest}.o"], check=True)
    command = ["g++" if source.endswith("cpp") else "gcc", "-O1", "-shared", "-fPIC", "-w", include]
    subprocess.run([*command, f"-Wl,-soname,{name}", *flags, HERE / source, f"{rest}.o", "-o", out], check=True)
    return out


if __name__ == "__main__":
    print(*build(Path(sys.argv[1])), sep=":")
