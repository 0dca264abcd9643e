"""How long the calculator takes from a moved control to the new prediction.

    python benchmarks/calculator.py

Prints what a thousand random moves took in milliseconds, each a new recipe, prediction and text.
Ends with status 1 when more than one in a hundred took longer than the 100 ms that feel immediate
(Nielsen, Usability Engineering, 1993): on a busy machine single moves wait for others. What
matplotlib and the browser then need to draw is not in the figures.
"""

import random
import statistics
import sys
import time

from vramlab_course.calculator import CONTROLS, Calculator

MOVES = 1000
LIMIT = 0.100  # seconds


def main() -> int:
    draw = random.Random(0)
    calculator = Calculator()
    took = []
    for _ in range(MOVES):
        # Controls without values are texts, which cannot be drawn.
        key, values = draw.choice([item for item in CONTROLS.items() if item[1]])
        value = draw.choice(values)
        start = time.perf_counter()
        calculator.change(**{key: value})
        # The text is part of what a reader waits for, and it is made only when it is asked for.
        str(calculator)
        took.append(
            (
                time.perf_counter() - start,
                f"{key}={value!r}",
                calculator.error or str(calculator.recipe),
            )
        )
    slowest, seconds = max(took), [seconds for seconds, *_ in took]
    median = statistics.median(seconds)
    last = statistics.quantiles(seconds, n=100)[-1]
    said = f"median {1e3 * median:.1f} ms, 99 % under {1e3 * last:.1f} ms"
    print(f"{MOVES} moves of {len(CONTROLS)} controls: {said}")
    print(f"slowest {1e3 * slowest[0]:.1f} ms: {slowest[1]}, then {slowest[2]}")
    # The 99th of the 99 points that cut the times into hundredths.
    return int(last > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
