"""One line about the relative errors of many runs, as the benchmarks print it."""

import statistics


def summary(found: list[tuple[float, str]]) -> str:
    """Say how many errors there are, their mean, median and worst.

    `found` has pairs of an error and the name of its run.
    """
    sizes = [abs(error) for error, _ in found]
    # The worst keeps its sign: too little is worse for a reader than too much.
    error, worst = max(found, key=lambda row: abs(row[0]))
    return (
        f"{len(sizes)} runs, mean {statistics.mean(sizes):.4%}, median "
        f"{statistics.median(sizes):.5%}, "
        f"{sum(size <= 0.01 for size in sizes) / len(sizes):.1%} within 1 %, "
        f"{sum(size < 5e-7 for size in sizes)} equal to six digits, worst {error:+.2%} ({worst})"
    )
