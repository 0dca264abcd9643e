"""The calculator in the page: its archive answers on the standard library alone, and in a real
browser as here.
"""

import functools
import json
import os
import random
import shlex
import shutil
import subprocess
import sys
import threading
import time
import zipfile
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlencode

import pytest
import simulated_tables
import web_calculator
from typer.testing import CliRunner
from vramlab import GiB, find_gpu, model_names, predict, simulate
from vramlab.base.errors import RecipeError
from vramlab.hardware.gpu import usable_memory
from vramlab.interfaces.cli import app
from vramlab_course.calculator import CONTROLS, START, UNSET, recipe_in

sys.path.insert(0, str(web_calculator.ROOT / "site" / "static" / "calculator"))
import bridge

ASK = """
import json, sys
sys.path[:0] = ["helpers", "."]
import bridge
page = json.loads(bridge.page())
asked = json.loads(sys.stdin.read())
answers = [json.loads(bridge.answer(json.dumps(state))) for state in asked]
config = json.loads(bridge.add_config("a b/c", '{"model_type": "qwen3", "hidden_size": 64}'))
print(json.dumps([page, answers, config, sorted({name.partition(".")[0] for name in sys.modules})]))
"""

MODELS = web_calculator.known_models()
VALUES = CONTROLS | {"model": MODELS}


def _js(value) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def draws(number: int, seed: int) -> list[dict]:
    """Random states of the controls."""
    rng = random.Random(seed)
    return [
        START
        | {
            name: rng.choice(values)
            for name, values in VALUES.items()
            if values and rng.random() < 0.3
        }
        for _ in range(number)
    ]


def expected(state: dict) -> dict:
    card = find_gpu(state["gpu"])
    held = 0
    if state["free_memory"] != UNSET:
        held = usable_memory(card) - (state["free_memory"] << 30)
    try:
        recipe = recipe_in(state)
        card.require(recipe.precision)  # as the command line does
        if held < 0:
            raise RecipeError("free_memory", state["free_memory"], "it must be a number of GiB")
        report = predict(
            recipe,
            gpu=card,
            other_memory=held,
            expandable_segments=state["expandable_segments"],
        )
    except RecipeError as error:
        return {"error": error.allowed}
    need = report.process
    return {
        "peak": report.peak.total,
        "parts": [[name, size] for name, size in report.peak.items() if size],
        "process": [need.low, need.value, need.high], "recipe": str(recipe), "notes": report.notes,
    }  # fmt: skip


def same(found: dict, state: dict) -> None:
    wanted = expected(state)
    if "error" in wanted:
        assert wanted["error"] in found["error"], state
    else:
        assert {name: found.get(name) for name in wanted} == wanted, state


def test_the_archive_answers_as_predict_does_without_any_library(tmp_path):
    web_calculator.write_archive(tmp_path / "vramlab.zip")
    zipfile.ZipFile(tmp_path / "vramlab.zip").extractall(tmp_path)
    states = draws(60, 1)
    run = subprocess.run(
        [sys.executable, "-I", "-S", "-c", ASK],
        input=json.dumps(states),
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    page, answers, config, modules = json.loads(run.stdout)
    assert not {"torch", "numpy", "transformers", "matplotlib"} & set(modules)
    for answer, state in zip(answers, states, strict=True):
        same(answer, state)
    assert sum("error" in answer for answer in answers) < 50
    assert [control["name"] for control in page["controls"]] == list(CONTROLS)
    assert page["controls"][0]["values"] == MODELS and 40 < len(MODELS) < len(model_names())
    assert "num_hidden_layers" in config["error"]
    assert "of a-b-c must say" in config["error"] and not (tmp_path / "a-b-c").exists()


@pytest.mark.parametrize(
    "changes, said",
    [
        (
            {"quantization": "nf4", "double_quant": True},
            {"SFTConfig(", "LoraConfig(", "BitsAndBytesConfig(", "    max_length=2048,"},
        ),
        ({"trainer": "transformers", "loop": "plain"}, {"TrainingArguments("}),
        (
            {"trainer": "transformers", "lora_r": UNSET, "loop": "optimizer_in_backward"},
            {"TrainingArguments("},
        ),
    ],
)
def test_code_of_an_answer_runs_and_says_the_same(changes, said):
    answer = json.loads(bridge.answer(json.dumps(bridge.BEGIN | changes)))
    names: dict = {"print": lambda *_: None}
    exec(answer["code"], names)
    assert (
        predict(names["recipe"]).peak.total == answer["peak"]
        and str(names["recipe"]) == answer["recipe"]
    )
    assert said <= set(answer["arguments"].splitlines())
    if loop := changes.get("loop"):
        assert f"loop={loop!r}" in answer["code"] and f"--loop {loop}" in answer["command"]
        assert answer["arguments"].startswith(
            f"# The Trainer cannot run loop={loop!r}. Its own has zero_grad='end', "
        )
    words = shlex.split(answer["command"].replace("\\\n", " "))
    said = CliRunner().invoke(app, [*words[1:], "--json"])
    assert json.loads(said.stdout)["peak"]["total"] == answer["peak"], said.output


def asked(call, state: dict, *more):
    """What a function of the bridge says of a state."""
    return json.loads(call(json.dumps(state), *more))


def begin(**changes) -> dict:
    return bridge.BEGIN | changes


def test_a_card_without_bf16_is_refused_as_by_the_command_and_fp16_mends_it():
    state = begin(gpu="T4", model="gpt2", seq_len=512)
    answer = asked(bridge.answer, state)
    said = CliRunner().invoke(app, ["predict", "gpt2", "--precision", "bf16-mixed", "--gpu", "T4"])
    reason = "bf16 starts at 8.0 (Ampere), below which torch only emulates it, slowly: take "
    assert said.exit_code != 0 and reason in said.output
    assert reason in answer["error"] and answer["control"] == "precision"
    (change,) = asked(bridge.repairs, state, "gpu")
    assert change == {"precision": "fp16-mixed", "dtype": "float16"}
    half = asked(bridge.answer, state | change)
    words = shlex.split(half["command"].replace("\\\n", " "))
    said = CliRunner().invoke(app, [*words[1:], "--json"])
    assert json.loads(said.stdout)["peak"]["total"] == half["peak"]
    refused = asked(bridge.refused, state | change, "precision")
    assert set(refused) == {str(CONTROLS["precision"].index("bf16-mixed"))}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_stage_of_sharding_is_one_click_from_an_answer_and_wakes_its_engine(stage):
    state = begin(stage=stage)
    answer = asked(bridge.answer, state)
    assert not {"engine", "world_size"} & set(answer["idle"])
    assert not asked(bridge.refused, begin(), "stage")
    for change in asked(bridge.repairs, state, "stage"):
        assert "error" not in asked(bridge.answer, state | change) and "stage" not in change
    assert ("error" in answer) == bool(asked(bridge.repairs, state, "stage")) == (stage < 2)


@pytest.mark.parametrize(
    "changes, moved, first",
    [
        ({"model": "gpt2"}, "model", {"seq_len": 1024}),
        ({"model": "gpt2", "seq_len": 4096}, "seq_len", {"seq_len": 1024}),
        ({"trainer": "kto"}, "trainer", {"batch_size": 2}),
        ({"stage": 1}, "stage", {"engine": "deepspeed"}),
        ({"precision": "fp16-mixed"}, "precision", {"dtype": UNSET}),
        ({"batch_size": 0}, "batch_size", {"batch_size": 1}),
        ({"lora_target": "nothing"}, "lora_target", {"lora_target": "all-linear"}),
        ({"gpu": "RTX 9999"}, "gpu", {"gpu": "RTX 4090"}),
        ({"packing": "maybe"}, "", {"packing": False}),
    ],
)
def test_a_refused_state_is_mended_by_one_click(changes, moved, first):
    state = begin(**changes)
    assert "error" in asked(bridge.answer, state)
    found = asked(bridge.repairs, state, moved)
    assert found[0] == first
    for change in found:
        assert "error" not in asked(bridge.answer, state | change), change


def test_the_first_page_answers_in_fp16_where_a_card_has_no_bf16():
    text = web_calculator.quick_answers().partition('json">')[2].partition("</script>")[0]
    needs = json.loads(text)["needs"]["llama-3.1-8b"]
    halves = {way: answers["T4"][4] for way, answers in needs.items()}
    assert halves == {
        "QLoRA": {"precision": "fp16-mixed", "trainer": "transformers"},
        "LoRA": {"precision": "fp16-mixed", "dtype": "float16"},
        "all weights": {"precision": "fp16-mixed"},
    }
    assert all(answers["RTX 4090"][4] == {} for answers in needs.values())


def test_what_others_hold_leaves_less_and_the_command_says_it():
    state = begin(free_memory=20)
    answer = asked(bridge.answer, state)
    assert answer["card"] == ["RTX 4090", 20 << 30] and answer["tier"] == "tight"
    assert asked(bridge.answer, begin())["tier"] == "likely"
    words = shlex.split(answer["command"].replace("\\\n", " "))
    said = CliRunner().invoke(app, [*words[1:], "--json"])
    assert json.loads(said.stdout)["usable"] == 20 << 30, said.output
    names: dict = {"print": lambda report: names.update(report=report)}
    exec(answer["code"], names)
    assert names["report"].usable == 20 << 30
    for wrong in (24, 0, "much"):
        answer = asked(bridge.answer, begin(free_memory=wrong))
        assert "at most the 23.510 that RTX 4090 has" in answer["error"]
        assert answer["control"] == "free_memory"
        first, *_ = asked(bridge.repairs, begin(free_memory=wrong), "")
        assert "error" not in asked(bridge.answer, begin(free_memory=wrong) | first)


def test_each_card_is_answered_as_when_it_is_chosen():
    rows = asked(bridge.cards, begin(free_memory=20))
    assert {row["card"] for row in rows} == set(CONTROLS["gpu"])
    assert [row["memory"] for row in rows] == sorted(row["memory"] for row in rows)
    for row in rows[:: len(rows) // 4]:
        chosen = asked(bridge.answer, begin() | row["change"])
        wanted = {name: chosen.get(name) for name in ("tier", "process", "speed")}
        assert {name: row.get(name) for name in wanted} == wanted, row
    by_name = {row["card"]: row for row in rows}
    half = by_name["T4"]["change"]
    assert half["precision"] == "fp16-mixed" and "precision" not in by_name["A100 40GB"]["change"]


@pytest.mark.parametrize("changes", [{}, {"lora_r": UNSET, "dtype": UNSET, "optim": "adamw_torch"}])
def test_a_change_saves_what_the_answer_after_it_says(changes):
    state = begin(**changes)
    before = asked(bridge.answer, state)["peak"]
    rows = asked(bridge.changes, state)
    assert len(rows) > 2
    for row in rows:
        after = asked(bridge.answer, state | row["change"])
        assert before - after["peak"] == row["saves"] > 0, row
    assert any(row["change"].get("quantization") == "nf4" for row in rows)
    assert "error" in asked(bridge.changes, begin(stage=1))


def test_the_largest_that_fits_does_and_the_next_does_not():
    state = begin(model="qwen3-0.6b")
    found = asked(bridge.largest, state)
    for name, unit in (("batch_size", 1), ("seq_len", 64)):
        safe, likely = found[name]["safe"], found[name]["likely"]
        assert unit <= safe <= likely
        tiers = [
            asked(bridge.answer, state | {name: value}).get("tier")
            for value in (safe, safe + unit, likely, likely + unit)
        ]
        assert tiers[0] == "safe" != tiers[1] and tiers[2] in ("safe", "likely"), tiers
        assert tiers[3] not in ("safe", "likely")
    short = asked(bridge.largest, begin(model="gpt2", seq_len=512))["seq_len"]
    assert short == {"safe": 1024, "likely": 1024, "limit": "gpt2 has 1024 positions"}
    none = asked(bridge.largest, begin(model="llama-3.1-70b"))["batch_size"]
    assert (none["safe"], none["likely"]) == (None, None)


@pytest.mark.parametrize("gpu", ["RTX 4090", "T4"])
@pytest.mark.parametrize("name", bridge.PRESETS)
def test_each_preset_has_an_answer_and_keeps_model_card_and_length(name, gpu):
    state = begin(model="qwen3-4b", gpu=gpu, seq_len=1024, stage=1, packing=True)
    wanted = asked(bridge.preset, state, name)
    answer = asked(bridge.answer, wanted)
    assert "error" not in answer, answer
    assert (wanted["model"], wanted["gpu"], wanted["seq_len"]) == ("qwen3-4b", gpu, 1024)
    assert wanted["stage"] == UNSET and wanted["packing"] is False


def test_a_name_of_the_hub_is_a_model_of_the_list():
    assert json.loads(bridge.named(" Qwen/Qwen2.5-7B-Instruct ")) == {"model": "qwen2.5-7b"}
    assert "foo/bar" in json.loads(bridge.named("foo/bar"))["error"]


def test_random_states_are_mended_by_one_click():
    rng = random.Random(4)
    wrong = 0
    for _ in range(25):
        state = {name: rng.choice(values or [""]) for name, values in VALUES.items()}
        changes = asked(bridge.repairs, state)
        wrong += bool(changes)
        for change in changes or [{}]:
            assert "error" not in asked(bridge.answer, state | change), (state, change)
    assert wrong > 15


def test_values_that_cannot_be_say_why():
    assert "'causal-lm'" in asked(bridge.refused, begin(), "task")["2"]
    trainers = asked(bridge.refused, begin(), "trainer")
    sampling = {str(CONTROLS["trainer"].index(name)) for name in ("grpo", "rloo")}
    assert trainers == dict.fromkeys(
        sampling, "the formulas do not know what it samples: ask simulate"
    )


def test_a_missing_configuration_is_asked_for_and_a_failing_one_keeps_the_first(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    state = begin(model="my-model")
    assert "config.json of my-model is missing" in asked(bridge.answer, state)["error"]
    good = json.loads((web_calculator.ROOT / "data" / "models" / "gpt2.json").read_text())
    text = json.dumps(good["config"]) if isinstance(good["config"], dict) else good["config"]
    assert json.loads(bridge.add_config("my-model", text))["model"] == "my-model"
    short = state | {"seq_len": 512}
    before = asked(bridge.answer, short)
    assert "error" not in before
    assert "error" in json.loads(bridge.add_config("my-model", "{"))
    assert asked(bridge.answer, short) == before
    assert json.loads(bridge.add_config("my-model", text))["model"] == "my-model"
    other = text.replace('"n_layer": 12', '"n_layer": 6')
    assert other != text
    assert json.loads(bridge.add_config("my-model", other))["model"] == "my-model-2"


def test_what_the_formulas_do_not_know_is_sent_to_simulate(monkeypatch):
    said = bridge._why(ImportError("transformers"))
    assert "vramlab simulate" in said and "predict" not in said


# --- in a browser

PATIENCE = 300_000  # milliseconds until a test gives up; how long something takes is not asserted
# Goes to each state by its address and waits until the answer of just that state is there.
VISIT = """async states => {
  const place = document.getElementById("calculator"), found = [];
  const text = (state) => JSON.stringify(state, Object.keys(state).sort());
  for (const [address, wanted] of states) {
    const there = new Promise((resolve) => {
      const look = () => text(JSON.parse(place.dataset.state)) === text(wanted)
        && (watcher.disconnect(), resolve());
      const watcher = new MutationObserver(look);
      watcher.observe(place, { attributes: true });
      location.hash = address;
      look();
    });
    await there;
    found.push(JSON.parse(place.dataset.answer));
  }
  return found;
}"""


def chromium() -> str | None:
    """The browser: by its path in CHROMIUM, Playwright's own (None), or the system's.

    Skips the test where there is none.
    """
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    system = map(
        shutil.which, ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    )
    if found := os.environ.get("CHROMIUM") or next(filter(None, system), None):
        return found
    with sync_api.sync_playwright() as play:
        if not Path(play.chromium.executable_path).exists():
            pytest.skip("no Chromium: install one, or run `playwright install chromium`")
    return None


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """The page by itself on a server, as a Space has it."""
    try:
        pyodide = web_calculator.fetch_pyodide(web_calculator.ROOT / "build")
    except OSError as error:
        pytest.skip(f"Pyodide could not be fetched from the npm registry: {error}")
    folder = tmp_path_factory.mktemp("page") / "space"
    web_calculator.write_space(folder, pyodide)
    handler = functools.partial(Quiet, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_) -> None:
        pass


@pytest.fixture(scope="module")
def page(request):
    """The calculator, answering, 390 pixels wide and in the dark; no error may have reached its
    console.
    """
    executable = chromium()
    from playwright.sync_api import sync_playwright

    address = request.getfixturevalue("address")
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        phone = {"width": 390, "height": 844}
        context = browser.new_context(viewport=phone, color_scheme="dark")
        page = context.new_page()
        page.set_default_timeout(PATIENCE)
        wrong: list[str] = []
        page.on(
            "console",
            lambda message: wrong.append(message.text) if message.type == "error" else None,
        )
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.goto(address)
        page.wait_for_selector("#calculator[data-answer]")
        yield page
        browser.close()
    assert wrong == []


def visit(page, states: list[dict]) -> None:
    begin = json.loads(
        page.evaluate("JSON.stringify(window.beginning ??= JSON.parse(calculator.dataset.state))")
    )
    asked = [(urlencode({k: _js(v) for k, v in state.items()}), begin | state) for state in states]
    for found, state in zip(page.evaluate(VISIT, asked), states, strict=True):
        same(found, state)


@pytest.mark.parametrize("many", [4, pytest.param(200, marks=pytest.mark.slow)])
def test_a_browser_says_the_same_bytes_for_drawn_recipes(page, many):
    visit(page, draws(many, 2))


def test_every_control_has_a_label_and_can_be_reached_in_order_by_keyboard(page):
    page.evaluate(
        "document.querySelectorAll('#calculator details').forEach((part) => (part.open = true))"
    )
    names = page.evaluate(
        """[...calculator.querySelectorAll("input, select, textarea")].map((part) =>
        [part.id, part.labels?.[0]?.textContent || part.getAttribute("aria-label") || ""])"""
    )
    assert len(names) > len(CONTROLS) and all(label.strip() for _, label in names), names
    wanted = page.evaluate(
        """[...calculator.querySelectorAll("summary, input, select, textarea, button, pre")]
        .filter((part) => !part.disabled).map((part, i) => (part.dataset.order = String(i)))"""
    )
    page.evaluate("document.activeElement?.blur()")
    page.locator("#calculator [data-order='0']").focus()
    reached = ["0"]
    for _ in wanted[1:]:
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.dataset.order"))
    assert reached == wanted


def test_the_answer_follows_a_key_and_is_said_to_screen_readers(page):
    visit(page, [{**START, "model": "gpt2", "gpu": "T4", "batch_size": 4}])
    said = page.locator("[data-part=said]")
    assert (said.get_attribute("role"), said.get_attribute("aria-live")) == ("status", "polite")
    before, field = said.inner_text(), page.locator("#calculator-batch_size")
    page.get_by_role("button", name="Batch size: more").click()
    page.wait_for_function(
        "before => document.querySelector('[data-part=said]').innerText !== before", arg=before
    )
    assert field.input_value() == "6" and "batch_size=6" in page.url
    assert "T4: " in said.inner_text() and "GiB" in said.inner_text()
    answer = json.loads(page.locator("#calculator").get_attribute("data-answer"))
    same(answer, {**START, "model": "gpt2", "gpu": "T4", "batch_size": 6})
    rows = page.locator("[data-part=table] tbody tr").count()
    assert rows == len(answer["parts"]) + 1


def test_a_phone_needs_no_scrolling_sideways(page):
    page.evaluate(
        "document.querySelectorAll('#calculator details').forEach((part) => (part.open = true))"
    )
    wide = """[...document.querySelectorAll("#calculator *")]
    .filter((part) => !part.closest("pre, svg"))
    .filter((part) => part.getBoundingClientRect().right > 390)
    .map((part) => part.outerHTML.slice(0, 120))"""
    assert page.evaluate("document.documentElement.scrollWidth") <= 390, page.evaluate(wide)


def settle(page, change: str = "") -> dict:
    """The answer when its controls and repairs are there too."""
    page.evaluate(f"delete calculator.dataset.settled; {change}")
    page.wait_for_selector("#calculator[data-settled]")
    return json.loads(page.locator("#calculator").get_attribute("data-answer"))


def test_a_stage_wakes_its_engine_and_a_click_mends_it(page):
    visit(page, [bridge.BEGIN])
    page.evaluate("calculator.querySelectorAll('details').forEach((part) => (part.open = true))")
    engine = page.locator("#calculator-engine")
    assert engine.is_disabled()
    waits = page.locator("label[for=calculator-engine] small")
    assert waits.is_visible() and waits.inner_text().strip() == "(needs ZeRO stage)"
    page.evaluate("delete calculator.dataset.settled")
    page.select_option("#calculator-stage", label="1")
    page.wait_for_selector("#calculator[data-settled]")
    assert engine.is_enabled() and not waits.is_visible()
    mend = page.get_by_role("button", name="deepspeed")
    page.evaluate("delete calculator.dataset.settled")
    mend.click()
    page.wait_for_selector("#calculator[data-settled]")
    answer = json.loads(page.locator("#calculator").get_attribute("data-answer"))
    assert "error" not in answer and "stage=1" in page.url and "engine=deepspeed" in page.url
    loops = page.locator("#calculator-loop option:disabled")
    assert loops.count() and "no: SFTTrainer has" in loops.first.text_content()


@pytest.mark.slow
def test_the_first_answer_stands_before_python_and_a_bar_says_how_far_it_is(page):
    fresh = page.context.new_page()
    fresh.set_default_timeout(PATIENCE)
    held: list = []
    fresh.route("**/python_stdlib.zip", lambda route: held.append(route))
    fresh.goto(page.url.partition("#")[0])
    fresh.wait_for_selector("#calculator[data-answer]")
    answer = json.loads(fresh.locator("#calculator").get_attribute("data-answer"))
    same(answer, bridge.BEGIN)
    bar = fresh.locator("#calculator progress")
    assert bar.is_visible() and fresh.locator("#calculator[data-settled]").count() == 0
    assert "MB, once" in fresh.locator("[data-part=loading]").inner_text()
    fresh.locator("#calculator-batch_size").fill("2")  # turned before Python is there
    assert "comes with Python" in fresh.locator("[data-part=said]").inner_text()
    until = time.monotonic() + PATIENCE / 1000
    while not held and time.monotonic() < until:  # a busy machine asks for it later
        fresh.wait_for_timeout(100)
    (route,) = held
    route.continue_()
    fresh.wait_for_selector("#calculator[data-settled]")
    same(
        json.loads(fresh.locator("#calculator").get_attribute("data-answer")),
        begin(batch_size=2),
    )
    assert bar.count() == 0
    fresh.close()


@pytest.mark.slow
def test_a_link_has_the_own_configuration_and_the_pinned_answer_in_it(page):
    entry = json.loads((web_calculator.ROOT / "data" / "models" / "gpt2.json").read_text())
    config = entry["config"] | {"n_layer": 5}
    settle(page, "location.hash = 'model=gpt2&seq_len=512'")
    page.evaluate("calculator.querySelectorAll('details').forEach((part) => (part.open = true))")
    page.locator("#calculator-config").fill(json.dumps(config, indent=1))
    page.get_by_role("button", name="Pin as A").click()
    page.evaluate("delete calculator.dataset.settled")
    page.get_by_role("button", name="Use it").click()
    page.wait_for_function("JSON.parse(calculator.dataset.state).model === 'my-model'")
    page.wait_for_selector("#calculator[data-settled]")
    answer = json.loads(page.locator("#calculator").get_attribute("data-answer"))
    assert "against A" in page.locator("[data-part=said]").inner_text()
    assert "Model gpt2 → my-model" in page.locator("[data-part=more]").inner_text()
    assert "config=" in page.url and "pinned=" in page.url
    link = page.url
    fresh = page.context.new_page()
    fresh.set_default_timeout(PATIENCE)
    fresh.goto(link)
    fresh.wait_for_selector("#calculator[data-settled]")
    assert json.loads(fresh.locator("#calculator").get_attribute("data-answer")) == answer
    assert "Model gpt2 → my-model" in fresh.locator("[data-part=more]").inner_text()
    fresh.close()
    page.get_by_role("button", name="Unpin A").click()


@pytest.mark.slow
def test_open_panels_follow_and_a_click_takes_what_they_offer(page):
    settle(page, "location.hash = 'model=qwen3-4b'")
    page.evaluate("calculator.querySelectorAll('details').forEach((part) => (part.open = true))")
    settle(page, "location.hash = 'model=qwen3-4b&seq_len=1024'")
    rows = page.locator("[data-part=cards] tbody tr")
    assert rows.count() == len(CONTROLS["gpu"])
    found = asked(bridge.largest, begin(model="qwen3-4b", seq_len=1024))["batch_size"]["safe"]
    page.evaluate("delete calculator.dataset.settled")
    page.locator("[data-part=largest] button").nth(0).click()
    page.wait_for_selector("#calculator[data-settled]")
    assert page.locator("#calculator-batch_size").input_value() == str(found)
    page.evaluate("delete calculator.dataset.settled")
    page.locator("[data-part=cards]").get_by_role("button", name="T4", exact=True).click()
    page.wait_for_selector("#calculator[data-settled]")
    assert "T4: " in page.locator("[data-part=said]").inner_text()
    assert "precision=fp16-mixed" in page.url
    page.evaluate("delete calculator.dataset.settled")
    page.get_by_role("button", name="QLoRA", exact=True).click()
    page.wait_for_selector("#calculator[data-settled]")
    assert "quantization=nf4" in page.url and "steps: " in page.locator(".epoch").inner_text()


def test_a_long_list_is_searched_and_a_name_of_the_hub_is_found(page):
    settle(page, "location.hash = ''")
    search = page.get_by_role("searchbox", name="Model: find")
    search.fill("qwen3 4b")
    kept = page.locator("#calculator-model option").all_text_contents()
    assert "qwen3-4b" in kept and len(kept) < 8
    search.fill("")
    page.evaluate("calculator.querySelectorAll('details').forEach((part) => (part.open = true))")
    page.evaluate("delete calculator.dataset.settled")
    page.locator("#calculator-named").fill("Qwen/Qwen2.5-7B-Instruct")
    page.locator("#calculator-named").press("Enter")
    page.wait_for_selector("#calculator[data-settled]")
    assert "model=qwen2.5-7b" in page.url


def test_the_answer_stays_one_line_on_a_phone_and_covers_no_control(page):
    settle(page, "location.hash = 'seq_len=1024'")
    box = page.locator("#calculator .answer").bounding_box()
    assert box["height"] < 48
    hidden = page.evaluate(
        """() => [...calculator.querySelectorAll("form select, form input")]
        .filter((part) => !part.disabled && part.checkVisibility())
        .map((part) => {
          scrollTo(0, document.body.scrollHeight);
          part.focus();
          const below = calculator.querySelector(".answer").getBoundingClientRect().bottom;
          return [part.id, part.getBoundingClientRect().top - below];
        }).filter(([, room]) => room < 0)"""
    )
    assert hidden == []


def test_an_address_answers_for_what_it_says_or_not_at_all(page):
    for address, said in (
        ("model=nobodys-model", "config.json of nobodys-model is missing"),
        ("gpu=RTX+9999", "RTX 9999"),
        ("seq_len=0", "whole number"),
    ):
        answer = settle(page, f"location.hash = {address!r}")
        assert said in answer["error"]
        assert page.locator("#calculator .repairs button").count()
    for number in (1, 1000):
        answer = settle(page, f"location.hash = 'seq_len={number}'")
        same(answer, bridge.BEGIN | {"seq_len": number})
        assert page.locator("#calculator-seq_len").input_value() == str(number)


@pytest.mark.parametrize(
    ("name", "row"), [("grpo", 2), pytest.param("images", 0, marks=pytest.mark.slow)]
)
def test_a_table_is_what_simulate_says(name, row):
    table = simulated_tables.TABLES[name]
    rows = list(table.rows())
    found = simulated_tables.stored()[name]["rows"]
    assert [tuple(each["words"]) for each in found] == [each.words for each in rows]
    card = table.cards[0]
    report = simulate(rows[row].recipe, gpu=card)
    assert found[row]["answers"][card] == simulated_tables.answer_of(report)
    head, _, *lines = simulated_tables.answers(name).partition("\n\n")[0].splitlines()
    assert {line.count("|") for line in (head, *lines)} == {len(table.columns + table.cards) + 1}
    shown = f"{report.process.value / GiB:.1f} {report.verdict} ({report.peak_phase})"
    assert lines[row].startswith("| " + " | ".join([*rows[row].words, shown]) + " |")


@pytest.mark.slow
def test_the_largest_images_are_what_plan_finds():
    table = simulated_tables.TABLES["largest"]
    rows = list(table.rows())
    found = simulated_tables.stored()["largest"]["rows"]
    assert [tuple(each["words"]) for each in found] == [each.words for each in rows]
    card = table.cards[0]
    answer = found[0]["answers"][card]
    assert answer == simulated_tables.largest(rows[0].recipe, card)
    _, _, *lines = simulated_tables.answers("largest").partition("\n\n")[0].splitlines()
    assert f"{answer[0]:,} pixels, {answer[1]:,} tokens: " in lines[0]
