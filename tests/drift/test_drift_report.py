"""The report as text: structure, policy, escaping of hostile tokens, size, contrast; the PNG; the command line."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import time
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import report_cases
from drift_cases import capsule
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from rlkernel_drift.capsule import Manifest, build_capsule, write_capsule
from rlkernel_drift.cli.main import main
from rlkernel_drift.compare import compare
from rlkernel_drift.report import MAX_BYTES, write_html
from rlkernel_drift.report.charts.heat import SEQUENTIAL, heat_map, palette, png
from rlkernel_drift.report.figure import write_png
from rlkernel_drift.report.markup import Markup, number, share, tag, visible
from rlkernel_drift.report.sections.tokens import colour, levels, sample
from rlkernel_drift.statistics import Lattice
from rlkernel_drift.verdict import (
    Diagnosis,
    Difference,
    Finding,
    Histogram,
    LayerView,
    Side,
    Status,
    Thread,
    Token,
    TokenView,
    Trend,
    Verdict,
)

ROOT = Path(__file__).resolve().parents[2]
STYLE = (ROOT / "consistency/rlkernel_drift/report/style.css").read_text(encoding="utf-8")
VOID = {"meta", "link", "br", "col"}
# Everything that reorders, hides or ends text: none of it may reach the page.
FORBIDDEN = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb]")
HOSTILE = [
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    '"><svg onload=alert(1)>',
    "' onmouseover='alert(1)",
    "\u202egnp.exe\u202c",
    "\u2066\u2067\u200f\u061c",
    "\0\x1b[31m\x07\x08",
    "]]>--><!--",
    "&lt;b&gt;&#x3c;",
    "${alert(1)} {{7*7}} `x`",
    "javascript:alert(1)",
    "z\u0335\u0321\u0322\u0327\u0328\u0334\u0335\u0336" * 40,
    "\ud800\udfff",
    "\u2028\u2029\ufeff\u200d",
    "$\\frac{1}{0}$",
    "</style><style>*{display:none}",
]


class Page(HTMLParser):
    """A parsed report; fails on tags that do not close in order."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text: dict[str, list[str]] = {}
        self.feed(html)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        assert len(dict(attributes)) == len(attributes), (name, attributes)
        self.tags.append((name, dict(attributes)))
        if name not in VOID:
            self.open.append(name)

    def handle_endtag(self, name: str) -> None:
        assert self.open and self.open.pop() == name, name

    def handle_data(self, data: str) -> None:
        if self.open:
            self.text.setdefault(self.open[-1], []).append(data)

    def attributes(self, name: str) -> list[str]:
        return [value or "" for _, found in self.tags for key, value in found.items() if key == name]


def check(html: str) -> Page:
    """What must hold for every report."""
    page = Page(html)
    names = [name for name, _ in page.tags]
    assert names.count("script") == 2 and names.count("style") == 1 and names.count("h1") == 1
    assert not {"img", "iframe", "object", "embed", "base", "form", "input", "audio", "video"} & set(names)
    keys = {key for _, found in page.tags for key in found}
    assert "style" not in keys and not [key for key in keys if key.lower().startswith("on")]
    ids = page.attributes("id")
    assert len(ids) == len(set(ids))
    for name, found in page.tags:
        for key in ("href", "src"):
            address = found.get(key)
            if address is None:
                continue
            if name == "a" and address.startswith("#"):
                assert address[1:] in ids
            elif name == "a":
                assert address.startswith("https://") and found["rel"] == "noopener noreferrer"
            else:
                assert address.startswith("data:")
    assert "url(" not in html and "@import" not in html
    assert not FORBIDDEN.search(html), FORBIDDEN.search(html)
    assert len(html.encode("utf-8")) <= MAX_BYTES
    policy = next(found["content"] for _, found in page.tags if found.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None and policy.startswith("default-src 'none';") and "unsafe" not in policy
    style, script = page.text["style"][0], page.text["script"][-1]
    for kind, text in (("style", style), ("script", script)):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    json.loads(page.text["script"][0])
    return page


@pytest.fixture(scope="module")
def verdicts() -> dict[str, Verdict]:
    return {name: make() for name, make in report_cases.CASES.items()}


SECTIONS = {
    "operator": "gates diagnosis metrics cost tokens layers distribution configuration provenance",
    "lattice": "gates metrics cost tokens distribution configuration provenance",
    "aligned": "gates metrics cost tokens distribution configuration provenance",
    "bits": "gates metrics cost tokens layers distribution configuration provenance",
    "semantics": "gates configuration provenance",
    "metrics": "gates metrics trend provenance",
    "broken": "provenance",
    "nothing": "gates metrics configuration provenance",
}


@pytest.mark.parametrize("name", report_cases.CASES)
def test_every_kind_of_verdict(name: str, verdicts: dict[str, Verdict]) -> None:
    verdict = verdicts[name]
    html = write_html(verdict)
    page = check(html)
    assert [found["id"] for tag_, found in page.tags if tag_ == "section"] == SECTIONS[name].split()
    # The verdict comes first, in words.
    assert html.index("<h1>") < html.index("<h2>")
    words = {
        Status.ALIGNED: "Aligned",
        Status.DRIFT: "Drift",
        Status.INPUTS_DIFFER: "Inputs differ",
        Status.INCONCLUSIVE: "Inconclusive",
        Status.UNUSABLE: "Unusable input",
    }
    assert f"<strong>{words[verdict.status]}</strong>" in html and f"exit status {verdict.exit_code}" in html
    assert html == write_html(verdict)
    # JSON holds all that the report needs.
    assert write_html(Verdict.model_validate_json(verdict.to_json())) == html


def test_words_of_the_operator_fault(verdicts: dict[str, Verdict]) -> None:
    html = write_html(verdicts["operator"])
    head = html[html.index("<header") : html.index("</header>")]
    for words in ("layers.7.down_proj", "What to change", "What it costs", "Compare the implementation"):
        assert words in head
    assert "first divergence" in html and 'class="band"' in html and 'class="line"' in html
    assert 'class="bar hot"' in html and "data:image/png;base64," in html


def test_drift_that_re_scoring_does_not_find_keeps_its_headline() -> None:
    found = Diagnosis(cause="none", statement="Both sides are the model as they declare it")
    verdict = compare(capsule(), capsule("train", noise=0.3)).model_copy(update={"diagnosis": found})
    page = write_html(verdict)
    assert re.search(r"<h1>[^/]*is 0\.2", page) and "Both sides are the model as they declare it" in page


def test_lattice_has_ticks(verdicts: dict[str, Verdict]) -> None:
    html = write_html(verdicts["lattice"])
    assert html.count('class="lattice"') >= 5 and "multiples of 1/32" in html


def test_first_divergence_in_bits(verdicts: dict[str, Verdict]) -> None:
    html = write_html(verdicts["bits"])
    assert "<h3>First divergence</h3>" in html and "<b>layers.5.attention</b>" in html


def test_trend_names_its_change(verdicts: dict[str, Verdict]) -> None:
    html = write_html(verdicts["metrics"])
    assert "step 150, weights 75" in html and "Since when" in html


def test_the_example_is_current() -> None:
    """`python tests/drift/report_cases.py docs/drift/examples operator` regenerates it."""
    html = (ROOT / "docs/drift/examples/operator.html").read_text(encoding="utf-8")
    page = check(html)
    assert page.text["style"][0] == STYLE
    assert page.text["script"][-1] == (ROOT / "consistency/rlkernel_drift/report/script.js").read_text(encoding="utf-8")


# ---- escaping ------------------------------------------------------------------------------------------------------


def hostile(text: str) -> Verdict:
    """A verdict whose every string is the text."""
    tokens = [
        Token(sequence=i, index=i, position=i, id=i, text=text, rollout=-1.0, train=-1.0 - d, difference=d, span=text)
        for i, d in enumerate((0.0, 0.1, -0.2))
    ]
    side = Side(
        label=text,
        kind="capsule",
        engine=text,
        stream=text,
        model=text,
        config={text: text},
        versions={text: text},
        hardware={text: text},
        command=[text, text],
    )
    found = Finding(
        cause=text,
        message=text,
        evidence={text: [text]},
        fix=text,
        threads=[Thread(name=text, url=text, seen=text), Thread(name="x", url=f"https://github.com/{text}")],
    )
    layers = LayerView(operators=[text, f"layers.0.{text}"], accumulated=[0.1, 0.2], heat=[[0.0, -1.0], [-2.0, None]])
    return Verdict(
        tool=text,
        status=Status.DRIFT,
        exit_code=1,
        headline=text,
        scope=text,
        profile=text,
        profile_source=text,
        rollout=side,
        train=side,
        gates=[{"name": "tokens", "title": text, "status": "failed", "summary": text, "findings": [found]}],
        tokens=TokenView(worst=tokens, strip=[tokens], scatter=[(-1.0, -2.0)]),
        layers=layers,
        diagnosis={
            "cause": text,
            "statement": text,
            "parameters": {text: text},
            "hypotheses": [{"name": text, "cause": text, "side": text, "residual": 0.1, "tail": 1, "over_floor": 2}],
            "excluded": [text],
            "finding": found,
        },
        consequences=[{"name": text, "setting": text, "words": text, "tokens": 0.5}],
        trends=[Trend(metric=text, steps=[1, 2], values=[0.1, 0.2], change=2, version=text, words=text)],
        differences=[Difference(key=text, rollout=text, train=text)],
        command=[text, "compare"],
    )


PIECES = st.one_of(
    st.sampled_from(HOSTILE),
    st.text(st.characters(), max_size=24),
    st.text(st.sampled_from("<>&\"'/=`\\\0\u202e\u2066\u200f\u0301\r\n\t -!]["), max_size=24),
)


def stays_text(text: str) -> None:
    html = write_html(hostile(text))
    check(html)
    drawn = re.search(r'id="t0">(.*?)</b>', html)
    assert drawn is not None and unescape(drawn[1]) == (visible(text, 32) or "∅")


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_stays_text(text: str) -> None:
    stays_text(text)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(PIECES, min_size=1, max_size=4).map("".join))
def test_any_text_stays_text(text: str) -> None:
    stays_text(text)


def test_visible_spells_out_what_hides() -> None:
    assert visible("a\u202eb\0") == "a⟨U+202E⟩b⟨U+0000⟩"
    assert visible("\n\t") == "↵⇥"
    assert visible("\u0301") == "◌\u0301" and visible("e" + "\u0301" * 5).count("⟨") == 3
    assert visible("\ud800") == "⟨U+D800⟩" and visible("\u00a0\u3000\u3164").count("⟨") == 3
    assert visible("x" * 50, 10) == "x" * 10 + "…"
    assert visible("Zwölf, 日本語, עברית") == "Zwölf, 日本語, עברית"


def test_markup_refuses_what_the_policy_drops() -> None:
    assert tag("p", "<b>", Markup("<i></i>"), title='"') == '<p title="&quot;">&lt;b&gt;<i></i></p>'
    for attributes in ({"style": "color: red"}, {"onclick": "x()"}, {"onLoad": "x()"}):
        with pytest.raises(ValueError, match="policy"):
            tag("p", **attributes)


def test_a_command_that_hides_something_has_no_copy_button() -> None:
    base = report_cases.broken()
    assert "data-copy" in write_html(base)
    for bad in ("a\nrm -rf ~", "\x1b[201~", "x\u202e", "y" * 9000):
        assert "data-copy=" not in write_html(base.model_copy(update={"command": ["rlkernel-drift", bad]}))


def one(difference: float | None, index: int = 0) -> Token:
    """A token with a difference."""
    return Token(
        sequence=0, index=index, position=index, id=7, text="x", rollout=-1, train=difference, difference=difference
    )


# ---- bounds --------------------------------------------------------------------------------------------------------


def test_hundred_thousand_tokens_of_two_capsules() -> None:
    rng = np.random.default_rng(0)
    lengths = [500] * 200
    completions = [rng.integers(0, 5000, n).tolist() for n in lengths]
    own = [-rng.exponential(1.0, n).astype(np.float32) for n in lengths]
    other = [v + rng.normal(0, 0.1, len(v)).astype(np.float32) for v in own]
    sides = [
        build_capsule(
            Manifest(side=side, vocabulary={str(i): f"<{i}>" for i in range(5000)}),
            [[1, 2]] * len(lengths),
            completions,
            {stream: values},
        )
        for side, stream, values in (("rollout", "recorded.processed", own), ("train", "train.processed", other))
    ]
    verdict = compare(*sides)
    start = time.perf_counter()
    html = write_html(verdict)
    assert time.perf_counter() - start < 10
    check(html)
    assert "A sample: 1,600 of 100,400 tokens, from 4 sequences of 200" in html
    assert re.search(r"tokens? of 100,000, evenly spaced", html)


def test_views_without_bounds_are_sampled() -> None:
    """A verdict of another program may hold lists of any length."""
    many = [
        Token(sequence=s, index=i, position=i, id=i, text="</script>" * 30, rollout=-1, train=-2, difference=-1.0 - i)
        for s in range(10)
        for i in range(10_000)
    ]
    strips = [many[s * 10_000 : (s + 1) * 10_000] for s in range(10)]
    evidence = {str(i): "<" * 999 for i in range(99)}
    findings = [Finding(cause="drift", message="<" * 5000, fix="<" * 5000, evidence=evidence)] * 500
    verdict = Verdict(
        status=Status.DRIFT,
        exit_code=1,
        headline="<" * 100_000,
        gates=[{"name": "x", "title": "x", "status": "failed", "summary": "y" * 10**6, "findings": findings}] * 7,
        tokens=TokenView(
            worst=many[:5000],
            strip=strips,
            scatter=[(-1.0 * i, -2.0) for i in range(100_000)],
            signed=Histogram(edges=[float(i) for i in range(5001)], counts=[1] * 5000),
        ),
        layers=LayerView(
            operators=[f"layers.{i}.output" for i in range(5000)],
            accumulated=[0.1] * 5000,
            local=[0.2] * 5000,
            floor=[0.1] * 5000,
            splice=[0.1] * 5000,
            heat=[[-1.0] * 500] * 5000,
            heat_tokens=list(range(500)),
        ),
        trends=[Trend(metric="m", steps=list(range(10_000)), values=[0.1] * 10_000)] * 40,
        differences=[Difference(key="<" * 999, rollout="<" * 999, train="x")] * 5000,
        command=["x" * 10**6],
    )
    html = write_html(verdict)
    check(html)
    assert "A sample: " in html and "of 100,000 tokens" in html
    assert "of 500 findings" in html


def test_a_window_surrounds_the_largest_difference() -> None:
    strip = [one(5.0 if i == 700 else 0.1, index=i) for i in range(1000)]
    (window,) = sample([strip], 100)
    assert len(window) == 100 and any(token.index == 700 for token in window)
    assert sample([strip], 2000) == [strip] and sample([], 100) == [] and sample([[]], 100) == []


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=1, max_size=12),
    st.floats(min_value=0, max_value=1e300),
)
@example([5e-324], 0.0)
@example([0.0, 1e-310], 0.0)
def test_any_numbers_draw(values: list[float], step: float) -> None:
    optional: list[float | None] = [*values, None]
    edges = sorted(v for v in values if math.isfinite(v))
    verdict = report_cases.broken().model_copy(
        update={
            "tokens": TokenView(
                worst=[one(v) for v in values],
                scatter=[(v, -v) for v in values],
                signed=Histogram(edges=edges, counts=[3] * max(len(edges) - 1, 0)),
                by_position=[(float(i), v) for i, v in enumerate(values)],
            ),
            "layers": LayerView(
                operators=[f"layers.{i}.x" for i in range(len(values))],
                accumulated=optional,
                local=optional,
                floor=optional,
                splice=optional,
                heat=[optional, values[::-1]],
            ),
            "trends": [Trend(metric="m", steps=[*range(len(values))], values=values, change=0, before=values[0])],
            "lattice": Lattice(step=step, concentration=1, tokens=3, exact=True),
        }
    )
    html = write_html(verdict)
    check(html)
    assert not re.search(r'="[^"]*\b(nan|inf)\b', html.lower())


# ---- numbers and colours -------------------------------------------------------------------------------------------


def test_numbers_do_not_round_away_what_matters() -> None:
    assert [share(v) for v in (0, 1, 1e-9, 1 - 1e-9, 0.5, None)] == ["0%", "100%", "<0.01%", ">99.99%", "50.00%", "–"]
    texts = [number(v) for v in (0, 3, 0.02787, 1.234e-7, 1234567, None, math.nan, -math.inf)]
    assert texts == ["0", "3", "0.02787", "1.23e-7", "1.23e6", "–", "NaN", "-∞"]


def test_strength_of_colour_follows_size() -> None:
    tokens = [one(d) for d in (0.3, -0.3, 0.04, 1e-6, 0.0, None)]
    edges = levels(tokens)
    assert edges == sorted(edges) and len(edges) == 4
    assert [colour(token, edges) for token in tokens] == ["p5", "n5", "p2", "p1", "z", "m"]


def rgb(code: str) -> tuple[float, ...]:
    return tuple(int(code[i : i + 2], 16) / 255 for i in (1, 3, 5))


def luminance(colour_: tuple[float, ...]) -> float:
    parts = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour_]
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]


def contrast(a: str, b: str) -> float:
    light, dark = sorted((luminance(rgb(a)), luminance(rgb(b))), reverse=True)
    return (light + 0.05) / (dark + 0.05)


PAIRS = dict(re.findall(r"--(\w+): light-dark\((#\w{6}, #\w{6})\)", STYLE))


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_contrast(theme: int) -> None:
    value = lambda name: PAIRS[name].split(", ")[theme]
    for ground in ("page", "panel", "faint"):
        for name in ("ink", "soft", "link", "good", "bad", "warn", "unsure"):
            assert contrast(value(name), value(ground)) >= 4.5, (name, ground)
        for name in ("hot", "line", "above", "below", "mark"):
            assert contrast(value(name), value(ground)) >= 2.4, (name, ground)
    for name in ("pos", "neg"):  # tokens stay legible on their strongest colour
        assert contrast(value("ink"), value(name)) >= 4.5, name


def seen(colour_: tuple[float, ...], kind: str) -> tuple[float, ...]:
    """A colour as seen without the long or the medium cones (Viénot, Brettel and Mollon 1999), on linear RGB."""
    r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour_)
    if kind == "protan":
        return 0.1121 * r + 0.8853 * g - 0.0005 * b, 0.1127 * r + 0.8897 * g - 0.0001 * b, 0.0045 * r + 1.0019 * b
    return 0.2920 * r + 0.7054 * g - 0.0003 * b, 0.2934 * r + 0.7089 * g, -0.0210 * r + 0.0253 * g + 0.9996 * b


@pytest.mark.parametrize("kind", ["protan", "deutan"])
def test_signs_can_be_told_apart_without_red_or_green(kind: str) -> None:
    for pair in (("pos", "neg"), ("above", "below"), ("good", "bad")):
        for theme in (0, 1):
            a, b = (seen(rgb(PAIRS[name].split(", ")[theme]), kind) for name in pair)
            assert math.dist(a, b) > 0.08, (pair, theme)


@pytest.mark.parametrize("heat", [[], [[]], [[], []], [[None]], [[], [None]], [[]] * 700, [[float("nan")]]])
def test_no_cells_no_heat_map(heat: list[list[float | None]]) -> None:
    """The script reads the first row of the cells."""
    assert heat_map(LayerView(operators=["a"], heat=heat)) is None
    drawn = heat_map(LayerView(operators=["a"], heat=[*heat, [-1.0]]))
    assert drawn is not None and {len(row) for row in drawn[1]["cells"]} == {1}  # type: ignore[attr-defined]


def test_heat_gets_lighter_step_by_step() -> None:
    steps = [luminance(tuple(c / 255 for c in colour_)) for colour_ in palette()]
    assert steps == sorted(steps) and palette()[0] == SEQUENTIAL[0] and palette()[-1] == SEQUENTIAL[-1]
    picture = png([bytes([0, 127, 255]), bytes([1, 2, 3])])
    assert picture.startswith(b"\x89PNG") and picture.endswith(b"IEND\xaeB`\x82")


# ---- PNG and command line ------------------------------------------------------------------------------------------


def test_png(tmp_path: Path, verdicts: dict[str, Verdict]) -> None:
    from matplotlib.image import imread

    for name in ("operator", "metrics", "broken"):
        write_png(verdicts[name], tmp_path / "x.png")
        pixels: Any = imread(tmp_path / "x.png")
        assert pixels.shape[1] == 1320 and pixels.std() > 0.02
    write_png(hostile("$\\frac{$ \0 <b> \u202e" * 20), tmp_path / "y.png")
    with pytest.raises(Exception, match="cannot write"):
        write_png(verdicts["broken"], tmp_path / "no" / "x.png")


def test_png_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(Exception, match=r"rlkernel\[drift\]"):
        write_png(report_cases.broken(), tmp_path / "x.png")


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_capsule(capsule(), tmp_path / "a")
    write_capsule(capsule("train", noise=0.3), tmp_path / "b")
    paths = [str(tmp_path / name) for name in ("a", "b", "v.json", "r.html", "p.png", "again.html")]
    assert main(["compare", paths[0], paths[1], "--json", paths[2], "--html", paths[3], "--png", paths[4]]) == 1
    assert main(["report", paths[2], "--html", paths[5]]) == 0
    assert Path(paths[3]).read_bytes() == Path(paths[5]).read_bytes() and Path(paths[4]).stat().st_size > 10_000
    check(Path(paths[3]).read_text(encoding="utf-8"))
    assert main(["report", paths[2]]) == 2 and "--html" in capsys.readouterr().err
    for text, words in (("{", "report-bad.json"), ('{"status": "fine"}', "status"), ("[" * 99 + "]" * 99, "deeper")):
        bad = tmp_path / "report-bad.json"
        bad.write_text(text)
        assert main(["report", str(bad), "--html", paths[5]]) == 2
        assert words in capsys.readouterr().err
    assert main(["report", str(tmp_path / "none.json"), "--html", paths[5]]) == 2


def test_an_unusable_input_has_a_report_too(tmp_path: Path) -> None:
    target = tmp_path / "r.html"
    assert main(["compare", str(tmp_path / "none"), "--html", str(target)]) == 2
    assert "Unusable input" in target.read_text(encoding="utf-8")
