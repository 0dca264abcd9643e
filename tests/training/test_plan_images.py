"""A plan for samples with images: the largest that fit, and the program that it writes."""

import json
import re
from dataclasses import replace

import pytest
from PIL import Image
from test_sft_images import TEMPLATE, processor, recipe_of, sample
from test_trainer_loop import assert_same_but_for_scalars
from tiny_image_models import IDS, SMALL
from transformers import AutoTokenizer
from vramlab import Recipe, plan, simulate
from vramlab.base.data import data_path
from vramlab.planning import image_search
from vramlab.planning.question import Question
from vramlab.recipe import images
from vramlab.report.report import Interval
from vramlab.training.models import build_model
from written_scripts import differing_dtypes, run_script, simulated

pytestmark = pytest.mark.usefixtures("quiet")
MIB = 1 << 20
ASKED = {"method": "lora", "global_batch": 2, "trainer": "sft", "images": 1}


@pytest.mark.slow
def test_the_largest_images_that_fit():
    """What is answered fits, and at most 3 % more pixels do not."""
    asked = ASKED | {"image_size": "700x1000", "tier": "tight", "checkpointing": True}
    found = plan(SMALL["qwen3_vl"], "RTX 4090", memory=530 * MIB, **asked)
    recipe = found.best.recipe
    assert recipe.seq_len == 512 + 2 + images.tokens(recipe)[0]
    larger = simulate(recipe.replace(max_pixels=beyond(found), seq_len=None), gpu="RTX 4090")
    assert larger.peak.total > found.best.report.peak.total
    assert beyond(found) <= (image_search.CLOSE + 0.01) * recipe.max_pixels


def beyond(found) -> int:
    """The pixels of which the best answer says that they do not fit."""
    (note,) = [note for note in found.best.notes if note.startswith("the largest images")]
    return int(note.split("; ")[1].split()[0].replace(",", ""))


@pytest.mark.parametrize("bytes_by_pixel", [0.2, 3.3, 70, 190])
@pytest.mark.parametrize("flat", [0, 60 * MIB])
def test_few_simulations_find_the_largest(bytes_by_pixel, flat, monkeypatch):
    """Of a process that grows with pixels, in a line once they are many."""
    tried = []

    def needs(search, recipe):
        tried.append(image_search._pixels(recipe))
        return Interval.of(int(max(flat, 40 * MIB + bytes_by_pixel * tried[-1])))

    monkeypatch.setattr(image_search.ImageSearch, "_needs", needs)
    asked = ASKED | {"image_size": "3000x4000", "gpu": "RTX 4090", "memory": 80 * MIB}
    search = image_search.ImageSearch(Question(SMALL["qwen3_vl"], **asked))
    (way,) = search._ways("lora")
    found = search._largest(way, "safe")
    most = 40 * MIB / bytes_by_pixel
    if most < 65_536:  # the processor's least
        assert found is None and "with images of 65,536 pixels" in search.lacks.popitem()[1]
    elif most > 12e6:
        assert found == (way, None)
    else:
        recipe, over = found
        assert recipe.max_pixels <= most < over < 1.04 * recipe.max_pixels
    assert len(tried) <= 6


@pytest.mark.parametrize(("tokens", "advised"), [(64, ""), (63, "; --tokens 2554")])
def test_too_few_tokens_for_text_are_said_with_what_to_ask(tokens, advised):
    image = "qwen3-vl-2b", 1, 2042 + tokens
    recipe = Recipe(*image, trainer="sft", images=1, image_size="1920x1080")
    assert len(images.shown(recipe)) == 2042
    said = image_search._about_text(recipe, tokens)
    assert said.startswith(f"{tokens} of {2042 + tokens:,} tokens are left for text")
    assert said.endswith(advised) and ("leaves it out" in said) is bool(advised)


@pytest.mark.slow
def test_a_written_program_trains_on_images(tmp_path):
    """Its bytes and dtypes on a CPU are those that were simulated."""
    made = processor()
    tiny = recipe_of(made)
    base = str(tmp_path / "base")
    build_model(tiny.replace(trainer="transformers"), "cpu").save_pretrained(base)
    made.save_pretrained(base)
    asked = ASKED | {"images": 2, "image_size": "40x24", "optims": "adamw_torch"}
    standing = []
    found = plan(
        base,
        "A100 80GB",
        seq_len=tiny.seq_len,
        standing=lambda *each: standing.append(each),
        **asked,
    )
    assert [done for _, done, _ in standing] == list(range(found.considered + 1))
    assert {count for _, _, count in standing} == {image_search.MOST_TRIED}
    for number in range(2):
        Image.new("RGB", (40, 24), (number, 9, 9)).save(tmp_path / f"{number}.png")
    row = {"messages": sample()["messages"], "images": ["0.png", "1.png"]}
    too_many = row | {"images": ["0.png"] * 3}
    lines = [json.dumps(each) for each in (*[row] * 40, too_many)]
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    found.write(tmp_path / "train.py")
    text = (tmp_path / "train.py").read_text()
    shown = re.search(r"\nTEXT = TOKENS - (\d+) ", text)
    assert found.best.text_tokens == found.best.recipe.seq_len - int(shown[1])
    assert f"{found.best.text_tokens} of {found.best.recipe.seq_len} tokens are left" in str(found)
    (seen,) = run_script(tmp_path, "--watch", watched=2, steps=(2,))
    said = simulated(found.best.recipe, 2)
    assert differing_dtypes(seen, said) == {}
    assert_same_but_for_scalars(seen, said)


VISION = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
}


def cutting_processor():
    """Qwen2-VL's processor for the small model, with the tokenizer of the small base model."""
    from transformers import Qwen2VLImageProcessor, Qwen2VLProcessor, Qwen2VLVideoProcessor

    tokenizer = AutoTokenizer.from_pretrained(data_path("base_model"), extra_special_tokens=VISION)
    shown = "".join(VISION[f"{name}_token"] for name in ("vision_start", "image", "vision_end"))
    sizes = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
    made = Qwen2VLImageProcessor(**sizes, size=images.READERS["qwen2_vl"]["size"])
    template = TEMPLATE.replace("<start_of_image>", shown)
    video = Qwen2VLVideoProcessor(**sizes)
    return Qwen2VLProcessor(made, tokenizer, video, chat_template=template)


def test_a_written_program_makes_images_smaller(tmp_path):
    """To `max_pixels`, as the processor of the model does; it needs torchvision."""
    pytest.importorskip("torchvision")
    made = cutting_processor()
    ids = dict(zip(IDS, made.tokenizer.convert_tokens_to_ids(VISION.values()), strict=True))
    plain = SMALL["qwen2_vl"]
    text = plain["text_config"] | {"vocab_size": len(made.tokenizer)}
    tiny = Recipe(plain | ids | {"text_config": text}, 1, images=1, image_size="100x80")
    base = str(tmp_path / "base")
    build_model(tiny, "cpu").save_pretrained(base)
    made.save_pretrained(base)
    asked = ASKED | {"image_size": "100x80", "optims": "adamw_torch", "checkpointing": False}
    found = plan(base, "A100 80GB", **asked)
    words = len(made.tokenizer("".join(turn["content"] for turn in sample()["messages"])).input_ids)
    cut = found.best.recipe.replace(max_pixels=4096, seq_len=None)
    cut = cut.replace(seq_len=2 + images.tokens(cut)[0] + words)
    Image.new("RGB", (100, 80), (3, 9, 9)).save(tmp_path / "0.png")
    row = {"messages": sample()["messages"], "images": ["0.png"]}
    (tmp_path / "train.jsonl").write_text("\n".join([json.dumps(row)] * 40))
    found.write(tmp_path / "train.py", replace(found.best, recipe=cut))
    assert "MAX_PIXELS = 4096" in (tmp_path / "train.py").read_text()
    (seen,) = run_script(tmp_path, "--watch", watched=2, steps=(2,))
    assert_same_but_for_scalars(seen, simulated(cut, 2))
