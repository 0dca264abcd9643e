"""Reports made by hand, for the tests of what shows reports."""

from vramlab.report.report import (
    CATEGORIES,
    Bytes,
    Cause,
    GiB,
    Interval,
    Moment,
    Phase,
    Report,
    TensorGroup,
)

TITLE = "polyglot-ko-1.3b · batch 4 · 256 tokens · fp16-true · adamw_torch"
RECIPE = {"model": "polyglot-ko-1.3b", "batch_size": 4, "seq_len": 256, "precision": "fp16-true"}
# The categories of a training step.
TRAINED = tuple(name for name in CATEGORIES if name != "kv_cache")


CAUSE = Cause(
    direction="backward",
    op="_log_softmax_backward_data",
    where="lm_head",
    size=2**27,
    category="temporaries",
    shape=(1024, 32768),
    dtype="float32",
)


def split(scale: float = 1.0, **changes: int) -> Bytes:
    """A plausible split whose every category differs from the others; sizes are whole bytes."""
    sizes = {
        "parameters": 2.481,
        "gradients": 2.482,
        "optimizer_states": 4.961,
        "activations": 1.217,
        "temporaries": 2.483,
        "buffers": 0.047,
        "inputs": 0.001,
        "workspace": 0.008,
    }
    return Bytes(**{**{name: int(n * scale * GiB) for name, n in sizes.items()}, **changes})


def report(source: str = "simulated", scale: float = 1.0, **changes) -> Report:
    """A report whose peak is `split(scale)` in the step; `changes` are fields of Report."""
    peak = split(scale)
    loaded = Bytes(parameters=peak.parameters, buffers=peak.buffers)
    kept = Bytes(
        parameters=peak.parameters, optimizer_states=peak.optimizer_states, buffers=peak.buffers
    )
    forward = Bytes(
        **{**dict(kept.items()), "activations": peak.activations, "inputs": peak.inputs}
    )
    backward = Bytes(**{**dict(forward.items()), "gradients": peak.gradients // 2})
    after = Bytes(**{**dict(kept.items()), "gradients": peak.gradients})
    phases = {
        "load": Phase(loaded, loaded),
        "forward": Phase(forward, forward),
        "backward": Phase(backward, after),
        "step": Phase(peak, after),
        "between_steps": Phase(after, kept),
    }
    steps = [
        ("forward", kept),
        ("forward", forward),
        ("backward", backward),
        ("backward", after),
        ("step", peak),
        ("step", after),
    ]
    values = {
        "recipe": RECIPE,
        "title": TITLE,
        "target": "cuda",
        "phases": phases,
        "peak": peak,
        "peak_phase": "step",
        "timeline": [Moment(10 * i, phase, bytes_) for i, (phase, bytes_) in enumerate(steps)],
        "largest": [
            TensorGroup(
                int(0.574 * GiB * scale),
                "temporaries",
                (30080, 2048),
                "float16",
                "_foreach_sqrt",
                "optimizer",
            ),
            TensorGroup(
                int(0.115 * GiB * scale),
                "parameters",
                (30080, 2048),
                "float16",
                "load",
                "embed_in",
                2,
            ),
        ],
        "reserved": Interval(int(peak.total * 1.01), int(peak.total * 1.05), int(peak.total * 1.1)),
    }
    return Report(source=source, **{**values, **changes})


def measured(scale: float = 1.0, unexplained: int = 12_345_344, **changes) -> Report:
    """A measured report: the same split with an unexplained rest, and whole figures of the
    allocator.
    """
    peak = split(scale, unexplained=unexplained)
    base = report("measured", scale)
    phases = {**base.phases, "step": Phase(peak, base.phases["step"].end)}
    values = {
        "peak": peak,
        "phases": phases,
        "reserved": int(peak.total * 1.06),
        "process": int(peak.total * 1.1),
    }
    return report("measured", scale, **{**values, **changes})


def out_of_memory(**changes) -> Report:
    """A run that did not fit: no figures, a message."""
    values = {
        "status": "oom",
        "message": "tried to allocate 2.00 GiB,\nof which 1.20 GiB were free",
        "phases": {},
        "peak": Bytes(),
        "peak_phase": "backward",
        "timeline": [],
        "largest": [],
        "reserved": None,
    }
    return report("measured", **{**values, **changes})


def of_batch(batch: int, source: str = "simulated", **changes) -> Report:
    """A report without a recipe whose activations grow with the batch."""
    peak = split(activations=int(1.2 * batch * GiB))
    title = TITLE.replace("batch 4", f"batch {batch}")
    return report(
        source, **{"peak": peak, "title": title, "recipe": None, "reserved": None, **changes}
    )
