"""`generate` under the tracker: fake tensors against real ones on this CPU, to the byte."""

import torch
from tiny_models import config
from vramlab.recipe.recipe import Recipe
from vramlab.simulation.fakes import fake_world
from vramlab.simulation.simulate import make_tracker
from vramlab.tracking.history import History
from vramlab.tracking.tracked import claim_cache, claim_model
from vramlab.tracking.tracker import Tracker
from vramlab.training.engine import Training
from vramlab.training.generation import run_generation
from vramlab.training.models import build_model

BATCH = 3
PROMPT = 7
NEW = 4


def followed(recipe: Recipe, tracker: Tracker, model: torch.nn.Module) -> list:
    """Return (phase, peak, end) of a generation's steps."""
    ids = torch.ones((BATCH, PROMPT), dtype=torch.int64)

    def on_step(made: int, cache: object) -> None:
        claim_cache(tracker, cache)
        if made:
            tracker.begin("decode")

    claim_model(tracker, model)
    tracker.claim([ids], "inputs")
    with tracker.modules(model), tracker:
        tracker.begin("prefill")
        made = run_generation(model, {"input_ids": ids}, NEW, on_step, eos_token_id=None)
    assert made.shape == (BATCH, PROMPT + NEW)
    tracker.finish()
    return History(tracker.log, tracker.marks).moments()


def test_a_fake_generation_takes_what_a_real_one_takes():
    recipe = Recipe(config("qwen3"), batch_size=BATCH, seq_len=PROMPT, precision="bf16-true")
    with fake_world("cpu"):
        fake = build_model(recipe).eval()
        training = Training(fake, None, None, torch.device("cpu"), multi_tensor=False)
        simulated = followed(recipe, make_tracker(training, None, None), fake)
    real = followed(recipe, Tracker("cpu"), build_model(recipe).eval())
    assert simulated == real
    assert [name for name, _, _ in real] == ["load", "prefill", *["decode"] * NEW]
    shape = recipe.shape.config
    of_a_token = 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"]
    for made, (_, _, end) in enumerate(real[1:-1]):
        assert end.kv_cache == 2 * BATCH * of_a_token * (PROMPT + made)
