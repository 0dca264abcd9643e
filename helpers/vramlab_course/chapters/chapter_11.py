"""What chapter 11's cells share: the kernel's count of sent bytes, a clock, and a data loader.

The loader also runs with a /dev/shm of its own, as small as in a container. And there are a card's
recorded sensors.
"""

import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch.utils.data import DataLoader, Dataset
from vramlab.measurement.records import measurements_folder, read_records
from vramlab.report.report import MiB

INTERFACES = Path("/proc/net/dev")  # Linux: bytes received, after each interface's name
SHARED = Path("/dev/shm")  # where the workers of a data loader leave batches
SETTLED = 1.0  # seconds without a change
# Makes /dev/shm this process's own, so that no other sees how small it is.
SMALL = "mount -t tmpfs -o size={mib}m tmpfs /dev/shm && exec {python} -m {module}"


def loopback_bytes() -> int | None:
    """Return the bytes that this machine has sent to itself; None where no kernel counts them."""
    if not INTERFACES.exists():
        return None
    for line in INTERFACES.read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == "lo":
            return int(counts.split()[0])
    return None


def best_seconds(work: Callable[[], object], times: int = 3) -> float:
    """Return the fewest seconds that `work` takes; before it, one call to warm up."""
    # Python does not wait for a GPU by itself.
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    seconds = []
    for _ in range(times + 1):
        wait()
        start = time.perf_counter()
        work()
        wait()
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


class Pictures(Dataset):
    """64 black pictures of 3 × 512 × 512 numbers in fp32: 3 MiB each."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        if index >= len(self):
            raise IndexError(index)
        return torch.zeros(3, 512, 512)


def picture_loader() -> DataLoader:
    """Return the loader of section 5: batches of 24 MiB, two workers, two batches ahead each."""
    return DataLoader(Pictures(), batch_size=8, num_workers=2, prefetch_factor=2)


def shared_mib(loader: DataLoader) -> float | None:
    """Return the MiB of /dev/shm that a loader fills while the first batch is held.

    None where there is no /dev/shm.
    """
    if not SHARED.exists():
        return None
    before = shutil.disk_usage(SHARED).used
    batches = iter(loader)
    held = next(batches)
    found = -1
    # The workers go on until each is as far ahead as it may be.
    while (used := shutil.disk_usage(SHARED).used) != found:
        found = used
        time.sleep(SETTLED)
    del held, batches  # ends the workers
    return (found - before) / MiB


def loader_in(mib: int) -> str:
    """Return how the loader of section 5 ends where /dev/shm has `mib` MiB.

    That takes a process with a mount of its own, which many containers do not allow.
    """
    if not shutil.which("unshare"):
        return "not tried: this machine has no unshare"
    script = SMALL.format(mib=mib, python=sys.executable, module=__name__)
    run = subprocess.run(
        ["unshare", "--mount", "--map-root-user", "sh", "-c", script],
        capture_output=True,
        text=True,
        timeout=120,
    )
    said = (run.stdout + run.stderr).strip().splitlines()
    last = said[-1] if said else ""
    if last.startswith(("unshare:", "mount:")):
        return "not tried: this machine allows no mounts"
    return last


def recorded_sensors(gpu: str) -> list[tuple]:
    """Return a row for each run whose sensors were recorded on a card with `gpu` in its name.

    They are the recipe's model, the medians of W and MHz, the highest °C, and what held the clock
    back.
    """
    rows = []
    for path in sorted(measurements_folder().glob("*.json")):
        for fact in read_records(path).facts.values():
            is_plain = not fact.asked.get("expandable")
            if fact.found.get("power") and is_plain and gpu in fact.environment["gpu"]:
                middle = [round(median(fact.found[name])) for name in ("power", "clock")]
                hot = max(fact.found["temperature"])
                reasons = ", ".join(fact.found["throttle"]) or "nothing"
                rows.append((fact.asked["recipe"]["model"], *middle, hot, reasons))
    return sorted(rows, key=lambda row: row[1])


def main() -> None:
    """Read all batches, and print how many they were."""
    print(f"read {sum(1 for _ in picture_loader())} batches")


if __name__ == "__main__":
    main()
