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
import zipfile
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlencode

import pytest
import web_calculator
from typer.testing import CliRunner
from vramlab import model_names, predict
from vramlab.faces.cli import app
from vramlab.report.errors import VramLabError
from vramlab_course.calculator import CONTROLS, START, UNSET, recipe_in

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
    try:
        recipe = recipe_in(state)
        report = predict(recipe, gpu=state["gpu"], expandable_segments=state["expandable_segments"])
    except VramLabError as error:
        return {"error": str(error)}
    need = report.process
    return {
        "peak": report.peak.total,
        "parts": [[name, size] for name, size in report.peak.items() if size],
        "process": [need.low, need.value, need.high], "recipe": str(recipe), "notes": report.notes,
    }  # fmt: skip


def same(found: dict, state: dict) -> None:
    wanted = expected(state)
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
    assert not (tmp_path.parent / "c").exists() and (tmp_path / "a-b-c" / "config.json").exists()


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
    sys.path.insert(0, str(web_calculator.ROOT / "site" / "static" / "calculator"))
    import bridge

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


# --- in a browser

PATIENCE = 300_000  # milliseconds until a test gives up; how long something takes is not asserted
SHELL = """<!doctype html><html lang="en"><title>Calculator</title><main><h1>Does my training \
fit?</h1>
<link rel="stylesheet" href="calculator/calculator.css"><div id="calculator"></div></main>
<script type="module" src="calculator/calculator.js"></script></html>"""
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
    """The page on a server, without the rest of the site."""
    try:
        pyodide = web_calculator.fetch_pyodide(web_calculator.ROOT / "build")
    except OSError as error:
        pytest.skip(f"Pyodide could not be fetched from the npm registry: {error}")
    folder = tmp_path_factory.mktemp("page")
    place = shutil.copytree(
        web_calculator.ROOT / "site" / "static" / "calculator", folder / "calculator"
    )
    web_calculator.write_archive(place / "vramlab.zip")
    shutil.copytree(pyodide, place / "pyodide")
    (folder / "index.html").write_text(SHELL, encoding="utf-8")
    (folder / "favicon.ico").write_bytes(b"")
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
        page = browser.new_page(viewport={"width": 390, "height": 844}, color_scheme="dark")
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


def test_a_browser_says_the_same_bytes_for_200_recipes(page):
    visit(page, draws(200, 2))


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
    before, slider = said.inner_text(), page.locator("#calculator-batch_size")
    slider.focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_function(
        "before => document.querySelector('[data-part=said]').innerText !== before", arg=before
    )
    assert slider.get_attribute("aria-valuetext") == "6" and "batch_size=6" in page.url
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
