"""The report in headless Chromium: it draws, obeys its policy, requests nothing, and works by keyboard.

Where Chromium is missing the tests are skipped, but fail where REQUIRE_CHROMIUM is set, as in CI.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from pathlib import Path

import chromium
import pytest
import report_cases
from chromium import Browser
from test_drift_report import HOSTILE, hostile

from rlkernel_drift.report import write_html
from rlkernel_drift.verdict import Token, Verdict


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if chromium.find() is None:
        if os.environ.get("REQUIRE_CHROMIUM"):
            pytest.fail(chromium.INSTALL)
        pytest.skip(chromium.INSTALL)
    with Browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("reports")
    made: dict[str, Verdict] = {name: make() for name, make in report_cases.CASES.items()}
    made["hostile"] = everything_hostile()
    paths = {name: folder / f"{name}.html" for name in made}
    for name, verdict in made.items():
        paths[name].write_text(write_html(verdict), encoding="utf-8")
    return paths


def everything_hostile() -> Verdict:
    """All hostile texts in one strip, and one of them everywhere else."""
    verdict = hostile(HOSTILE[0] + HOSTILE[1])
    assert verdict.tokens is not None
    strip = [
        Token(sequence=0, index=i, position=i, id=i, text=text, rollout=-1, train=-1, difference=0.1 * i, span=text)
        for i, text in enumerate(HOSTILE)
    ]
    return verdict.model_copy(update={"tokens": verdict.tokens.model_copy(update={"strip": [strip], "worst": strip})})


@pytest.mark.parametrize("name", [*report_cases.CASES, "hostile"])
def test_quiet_and_within_its_width(browser: Browser, pages: dict[str, Path], name: str) -> None:
    for width, dark in ((1360, False), (820, True), (360, False)):
        browser.open(pages[name], width=width, dark=dark)
        assert browser.errors == []
        assert browser.requests == [pages[name].resolve().as_uri()]
        assert browser.eval("document.documentElement.scrollWidth - innerWidth") <= 0
        # Nothing is wider than the column, except elements that scroll.
        wide = """[...document.querySelectorAll('main *')].filter(e => !e.closest('.scroll, .plot, .sr')
            && e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML.slice(0, 120))"""
        assert browser.eval(wide) == []


def test_policy_stops_what_is_not_the_report(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["operator"])
    attack = """new Promise(done => {
        const broken = [];
        document.addEventListener('securitypolicyviolation', e => broken.push(e.effectiveDirective));
        const script = document.createElement('script');
        try { script.text = 'window.pwned = 1'; } catch { broken.push('trusted-types'); }
        document.body.append(script);
        const button = document.createElement('button');
        try { button.setAttribute('onclick', 'window.pwned = 2'); } catch { broken.push('trusted-types'); }
        document.body.append(button); button.click();
        try { document.body.insertAdjacentHTML('beforeend', '<b>x</b>'); } catch { broken.push('trusted-types'); }
        const image = document.createElement('img');
        image.src = 'https://example.com/x.png'; document.body.append(image);
        fetch('https://example.com/').catch(() => 0);
        const p = document.createElement('p'); p.setAttribute('style', 'color: red'); document.body.append(p);
        setTimeout(() => done(broken), 300);
    })"""
    broken = set(browser.eval(attack))
    assert {"trusted-types", "img-src", "connect-src", "style-src-attr"} <= broken
    assert browser.eval("window.pwned === undefined")
    failed = [e["params"] for e in browser.events if e["method"] == "Network.loadingFailed"]
    assert failed and {event.get("blockedReason") for event in failed} == {"csp"}


def test_hostile_tokens_are_text(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["hostile"])
    assert browser.eval("document.querySelectorAll('script').length") == 2
    assert browser.eval("document.querySelectorAll('img, iframe').length") == 0
    assert browser.eval("document.querySelectorAll('.strip b').length") == len(HOSTILE)
    assert not [event for event in browser.events if event["method"] == "Page.javascriptDialogOpening"]
    # The card shows the same text, as text.
    browser.eval("document.querySelector('.strip').focus()")
    browser.key("ArrowRight")
    browser.key("ArrowRight")
    assert browser.eval("document.querySelector('#card p').textContent") == "<img src=x onerror=alert(1)>"
    assert browser.eval("document.querySelectorAll('#card img').length") == 0


def test_tokens_by_keyboard_and_pointer(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["operator"])
    browser.eval("document.querySelector('.strip').focus()")
    assert browser.eval("document.getElementById('card').hidden")
    browser.key("Home")
    place = "[...document.querySelectorAll('.strip b')].findIndex(b => b.classList.contains('on'))"
    assert browser.eval(place) == 0 and not browser.eval("document.getElementById('card').hidden")
    browser.key("ArrowRight")
    assert browser.eval(place) == 1
    browser.key("ArrowDown")
    assert browser.eval(place) > 1
    browser.key("w")
    card = "document.getElementById('card').textContent"
    assert "-0.4112" in browser.eval(card)  # the largest difference of the first strip
    browser.key("w")
    assert "-0.4112" not in browser.eval(card)
    browser.key("Escape")
    assert browser.eval("document.getElementById('card').hidden")
    browser.point(".strip b.p4, .strip b.n4")
    assert "train - rollout" in browser.eval(card)
    # A row of the table leads to its token, and opens the fold that it lies in.
    browser.eval("[...document.querySelectorAll('.tokens a')].pop().click()")
    assert browser.eval("document.activeElement.classList.contains('strip')") and browser.eval(place) >= 0


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("operator", "layers", "accumulated"),
        ("operator", "splice", "when exchanged"),
        ("operator", "heat", "from token"),
        ("operator", "scatter", "rollout"),
        ("operator", "signed", "token"),
        ("operator", "ulps", "ulps"),
        ("operator", "position", "around token"),
        ("metrics", "trend", "step"),
    ],
)
def test_charts_can_be_read(browser: Browser, pages: dict[str, Path], name: str, kind: str, words: str) -> None:
    browser.open(pages[name])
    read = f"document.querySelector('.chart.{kind} .read').textContent"
    hint = browser.eval(read)
    assert "arrow keys" in hint
    browser.eval(f"document.querySelector('.chart.{kind} .plot').focus()")
    seen = []
    for key in ("ArrowRight", "ArrowRight", "End", "ArrowLeft", "Home"):
        browser.key(key)
        seen.append(browser.eval(read))
    assert len(set(seen)) >= 4 and all(words in text for text in seen), seen
    browser.key("Escape")
    browser.eval("document.activeElement.blur()")
    assert browser.eval(read) == hint
    browser.point(f".chart.{kind} .plot svg")
    if kind != "scatter":  # its middle may hold no point
        assert words in browser.eval(read)


def test_every_control_is_reached_by_tab(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["operator"])
    browser.key("Tab")
    assert browser.eval("document.activeElement.className") == "skip"
    reached = set()
    for _ in range(150):
        browser.key("Tab")
        reached.add(browser.eval("(e => e.dataset?.copy || e.id || e.className || e.tagName)(document.activeElement)"))
    assert {"theme", "plot", "strip", "SUMMARY", "command"} <= reached
    outline = "getComputedStyle(document.activeElement).outlineStyle"
    browser.eval("document.querySelector('.strip').focus({focusVisible: true})")
    assert browser.eval(outline) == "solid"


def test_light_and_dark(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["operator"], dark=False)
    ground = "getComputedStyle(document.body).backgroundColor"
    light = browser.eval(ground)
    browser.theme(True)
    dark = browser.eval(ground)
    assert light != dark
    browser.eval("document.getElementById('theme').focus()")
    browser.key("Enter")
    assert browser.eval("document.documentElement.dataset.theme") == "light" and browser.eval(ground) == light
    browser.key("Enter")
    assert browser.eval("document.documentElement.dataset.theme") == "dark" and browser.eval(ground) == dark


def test_without_script(browser: Browser, pages: dict[str, Path]) -> None:
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.open(pages["operator"])
        browser.screenshot(pages["operator"].with_suffix(".png"), full=False)
    finally:
        browser.call("Emulation.setScriptExecutionDisabled", value=False)
    # No control that would do nothing is shown.
    assert browser.eval("getComputedStyle(document.getElementById('theme')).display") == "none"
    assert "down_proj" in browser.eval("document.querySelector('h1').innerText")


def test_charts_have_names(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["operator"])
    nodes = browser.call("Accessibility.getFullAXTree")["nodes"]
    named = [(n["role"]["value"], n.get("name", {}).get("value", "")) for n in nodes if not n["ignored"]]
    images = [name for role, name in named if role in ("image", "img")]
    assert len(images) >= 7 and all(images)
    assert [name for role, name in named if role == "navigation"] == ["Sections"]


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_page_is_drawn(browser: Browser, pages: dict[str, Path], tmp_path: Path, dark: bool) -> None:
    from PIL import Image

    browser.open(pages["operator"], width=1280, dark=dark)
    browser.screenshot(tmp_path / "page.png")
    picture = Image.open(io.BytesIO((tmp_path / "page.png").read_bytes())).convert("RGB")
    assert picture.width == 1280 and picture.height > 3000
    colours = picture.getcolors(1 << 24) or []
    assert len(colours) > 500
    # the most frequent colour is the background of the theme
    assert max(colours)[1] == ((21, 23, 27) if dark else (251, 250, 247))
