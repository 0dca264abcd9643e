"""CPU time of the program `vramlab` from a shell.

It stands beside that of importing torch and GPT-2's modelling code.

Prints a line a command: seconds of user time, the least of ROUNDS runs, and how many times those of
the import that is. The runs take turns, so that a busy machine slows all of them down.
"""

import resource
import subprocess
import sys

ROUNDS = 3
BESIDE = ["-c", "import torch, transformers.models.gpt2.modeling_gpt2"]
COMMANDS = {
    "simulate": (["-m", "vramlab", "simulate", "gpt2"], 1.3),
    "doctor": (["-m", "vramlab", "doctor"], 0.2),
    "predict": (["-m", "vramlab", "predict", "gpt2"], 0.08),
}


def user_seconds(arguments: list[str]) -> float:
    """User time of one Python process with `arguments`, whatever its exit status."""
    # Of all children that have ended, so the difference is the last one's.
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    subprocess.run([sys.executable, *arguments], capture_output=True)
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before


def main() -> None:
    runs = {"import": BESIDE, **{name: arguments for name, (arguments, _) in COMMANDS.items()}}
    least = dict.fromkeys(runs, float("inf"))
    for _ in range(ROUNDS):
        for name, arguments in runs.items():
            # The least of the rounds: other programs can only add to it.
            least[name] = min(least[name], user_seconds(arguments))
    print(f"import    {least['import']:6.2f} s")
    for name, (_, most) in COMMANDS.items():
        print(
            f"{name:<9} {least[name]:6.2f} s  {least[name] / least['import']:.2f} × (at most "
            f"{most} ×)"
        )


if __name__ == "__main__":
    main()
