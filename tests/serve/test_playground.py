"""The playground in a real browser: it streams, tints guesses, proves answers identical, and escapes everything."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_server import Running, tiny_engine

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with Running(tiny_engine(num_pages=200)) as server:
        yield server


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is missing: run `make test-browser`")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("there is no chromium here: run `make test-browser`")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser, running) -> Iterator[object]:
    page = browser.new_page(viewport={"width": 1200, "height": 1100})
    problems: list[str] = []
    foreign: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda request: foreign.append(request.url) if not request.url.startswith(running.url) else None)
    page.set_default_timeout(60_000)
    page.goto(running.url)
    yield page
    page.close()
    assert problems == []
    assert [url for url in foreign if not url.startswith("data:")] == [], "the page asked another host"


def ask(page, message: str, tokens: int = 40) -> None:
    page.fill("#prompt", message)
    page.fill("#max-tokens", str(tokens))
    page.click("#send")
    page.wait_for_selector("#stop:disabled")
    page.wait_for_selector("#send:enabled")


def answer(page, speculate: bool) -> str:
    return page.inner_text(f"section[data-speculate={str(speculate).lower()}] .answer")


def test_both_answers_stream_side_by_side_and_are_proven_identical(page):
    ask(page, "tell me")
    assert page.inner_text("#verdict").startswith("Identical: all ")
    assert answer(page, True) == answer(page, False) != ""
    assert page.locator("section[data-speculate=true] .guessed").count() > 0
    assert page.locator("section[data-speculate=false] .guessed").count() == 0
    assert "acceptance length" in page.inner_text("section[data-speculate=true] .summary")


def test_a_comparison_is_fair_and_says_how_much_faster_it_was(page):
    sent = []

    def note(request):
        if request.post_data and request.post_data_json["stream"]:  # a short warm-up comes before
            sent.append(request.post_data_json)

    page.on("request", note)
    ask(page, "first")
    ask(page, "second")
    assert [body["speculate"] for body in sent] == [True, False, False, True], "who goes first alternates"
    assert len({body["cache_salt"] for body in sent}) == 4, "no side finds the other's prompt cached"
    assert re.search(r"With speculation \d+\.\d\dx as fast \(.* plain decoding went first", page.inner_text("#verdict"))
    assert page.inner_text("#model") == "tiny"


def test_panes_end_when_their_answer_fails(page):
    page.fill("#max-tokens", "100000")
    page.click("#send")
    page.wait_for_selector("#verdict:has-text('max_tokens')")
    assert page.locator(".summary").all_inner_texts() == ["no answer", "no answer"]


def test_a_token_tells_its_position_and_tree_by_hover_and_by_keyboard(page):
    ask(page, "tell me")
    guessed = page.locator("section[data-speculate=true] .guessed").first
    assert re.search(r"guessed by the draft, position 1 .* tree of \d+ nodes", guessed.get_attribute("title"))
    page.focus("section[data-speculate=true] .answer")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.inner_text("section[data-speculate=true] .detail").startswith("Token 2 ")


def test_the_whole_form_can_be_used_from_the_keyboard(page):
    page.focus("#prompt")
    page.keyboard.press("Control+A")
    page.keyboard.type("from keys")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("in two")
    assert page.input_value("#prompt") == "from keys\nin two"
    page.keyboard.press("Enter")
    page.wait_for_selector("#verdict:has-text('Identical')")
    reached = set()
    page.focus("#prompt")
    for _ in range(12):
        reached.add(page.evaluate("document.activeElement.id"))
        page.keyboard.press("Tab")
    assert {"prompt", "temperature", "seed", "max-tokens", "speculate", "compare", "send", "reset"} <= reached


def test_one_answer_alone_and_the_switch_for_speculation(page):
    page.uncheck("#compare")
    page.uncheck("#speculate")
    ask(page, "alone")
    assert page.locator("#panels section").count() == 1
    assert page.locator("#panels .guessed").count() == 0


def test_what_the_model_writes_never_becomes_markup(page):
    nasty = '<img src=x onerror="document.title=1"><script>document.title=2</script>&amp;'
    token = {"id": 1, "text": nasty, "draft_position": 1, "tree_nodes": 3}
    stats = {"passes": 1, "acceptance_length": 1.0}
    body = [
        {"choices": [{"index": 0, "tokens": [token]}]},
        {"choices": [], "usage": {"completion_tokens": 1, "speculation": stats}},
    ]
    stream = "".join(f"data: {json.dumps(part)}\n\n" for part in body) + "data: [DONE]\n\n"
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=stream, content_type="text/event-stream"))
    ask(page, nasty)
    assert answer(page, True) == nasty
    assert nasty in page.inner_text("#turns")
    assert page.locator("#panels img, #panels script, #turns img").count() == 0
    assert page.title() == "Slipstream playground"


def test_the_charts_follow_the_server(page):
    ask(page, "draw", tokens=80)
    page.wait_for_selector("#length-now:has-text('since the server started')")
    assert page.get_attribute("#speed-line", "points")
    assert "draft: EAGLE-3" in page.inner_text("#setup")


def test_errors_of_the_server_are_shown(page):
    ask(page, "x" * 500)
    assert "context" in page.inner_text("#verdict")


def test_reasoning_and_calls_are_shown_and_results_go_back(page):
    call = {"index": 0, "id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": '}}
    deltas = [
        {"reasoning_content": "Hm <b>."},
        {"tool_calls": [call]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '"Oslo"}'}}]},
    ]
    token = {"id": 1, "text": "x", "draft_position": 1, "tree_nodes": 3}
    parts = [{"choices": [{"index": 0, "delta": delta, "tokens": [token]}]} for delta in deltas]
    usage = {"completion_tokens": 3, "speculation": {"passes": 1, "acceptance_length": 3.0}}
    stream = "".join(f"data: {json.dumps(part)}\n\n" for part in [*parts, {"choices": [], "usage": usage}])
    sent = []

    def answer_with_a_call(route):
        sent.append(route.request.post_data_json)
        route.fulfill(body=stream + "data: [DONE]\n\n", content_type="text/event-stream")

    page.route("**/v1/chat/completions", answer_with_a_call)
    page.uncheck("#compare")
    page.check("#use-tools")
    page.click("#send")
    page.wait_for_selector("#results input")
    assert page.inner_text(".thought") == "Hm <b>."
    assert page.inner_text(".calls li") == 'get_weather({"city": "Oslo"})'
    assert sent[-1]["tools"][0]["function"]["name"] == "get_weather"
    page.fill("#results input", "12 degrees")
    page.click("#send")
    page.wait_for_selector("#turns li:nth-child(3)")
    *_, said, result = sent[-1]["messages"]
    assert said["tool_calls"][0]["function"]["arguments"] == '{"city": "Oslo"}'
    assert said["reasoning_content"] == "Hm <b>."
    assert result == {"role": "tool", "tool_call_id": "c1", "name": "get_weather", "content": "12 degrees"}


def test_a_phone_shows_everything_without_sideways_scrolling(page, tmp_path):
    page.set_viewport_size({"width": 360, "height": 780})
    ask(page, "small screen")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    page.screenshot(path=tmp_path / "phone.png", full_page=True)
    assert Path(tmp_path / "phone.png").stat().st_size > 10_000
