"""Chapter 06: peaks and speeds of 4-bit models as tables."""

import re
from collections.abc import Mapping

from vramlab import GiB, Recipe, Report, measure, predict
from vramlab.hardware.gpu import Gpu
from vramlab.report.report import text_table

# Parts of a peak, by how a report's groups of tensors read.
PARTS = {
    "MLPs: gate, up, activation": r"by (add|silu) in .*mlp",
    "head's bf16 copy": r"bfloat16 .* by _to_copy in .*lm_head",
    "loss, in fp32": "log_softmax|nll_loss",
    # Adapters share the product that ends a norm or an MLP, or each copies its input.
    "adapters' inputs": r"by mul in .*(norm|mlp)|×\d+×\d+\] by _to_copy in .*lora_A",
}


def predicted_and_recorded(cases: Mapping[str, Recipe], card: Gpu) -> str:
    """A table of the peak that is predicted for a card, and of what the course's H200 did."""
    rows: list[tuple] = [("GiB", "parameters", "predicted peak", "recorded peak", "tokens/s")]
    for name, recipe in cases.items():
        said = predict(recipe, gpu=card).peak
        seen = measure(recipe, recorded=True)
        sizes = said.parameters / GiB, said.total / GiB, seen.peak.total / GiB
        rows.append((name, *sizes, round(seen.speed.tokens_per_second)))
    return text_table(rows, ".2f")


def peak_in_parts(
    reports: Mapping[str, Report], unit: int, heading: str, adapters: bool = False
) -> str:
    """A table of the parts of each report's peak; `adapters`: with the adapters' inputs."""
    rows: dict[str, list] = {}
    for report in reports.values():
        parts = {"parameters": report.peak.parameters}
        for part, pattern in [*PARTS.items()][: None if adapters else -1]:
            groups = [each for each in report.largest if re.search(pattern, str(each))]
            parts[part] = sum(each.count * each.size for each in groups)
        parts["all else"] = report.peak.total - sum(parts.values())
        for part, size in {**parts, "sum": report.peak.total}.items():
            rows.setdefault(part, [part]).append(size / unit)
    return text_table([(heading, *reports), *rows.values()], ".2f")
