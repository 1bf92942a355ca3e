"""The report in a real browser: what it shows, how it behaves, and that it loads nothing."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys

import pytest

from fedcohort.cli import invoke
from fedcohort.experiments.results import read
from fedcohort.report.content import Content
from fedcohort.report.figures import run_figures

HOSTILE = "<script>document.title='stolen'</script><img src=x onerror=document.title='stolen'>"
ACCURACY = ("accuracy-rounds", "accuracy-megabytes", "accuracy-seconds")


@pytest.fixture(scope="module")
def report(comparison_folder, tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "report.html"
    assert invoke(["report", str(comparison_folder), "-o", str(path)]) == 0
    return path


@pytest.fixture(scope="module")
def opened(browser, report):
    """Open a page; no console message, error or request beyond the file may occur on any."""
    contexts, troubles = [], []

    def open_page(path=report, **options):
        context = browser.new_context(**{"viewport": {"width": 1200, "height": 900}, **options})
        contexts.append(context)
        tab = context.new_page()
        tab.set_default_timeout(120_000)
        tab.on("console", lambda message: troubles.append(message.text))
        tab.on("pageerror", lambda error: troubles.append(str(error)))
        tab.on("request", lambda r: r.url.startswith("file:") or troubles.append(r.url))
        tab.goto(path.as_uri())
        tab.wait_for_selector("html[data-ready=true]", timeout=120_000)
        return tab

    yield open_page
    for context in contexts:
        context.close()
    assert [t for t in troubles if not t.startswith(("data:", "blob:"))] == []


@pytest.fixture(scope="module")
def tab(opened):
    """The report in a tab that tests share; each leaves it as it found it."""
    return opened()


def test_every_figure_has_its_marks(tab, comparison_folder):
    shown = Content(read(comparison_folder))
    # In each chart: 3 highlighted lines, 1 baseline and a faint one, and a band for each of 3.
    for name in ACCURACY:
        assert tab.locator(f"#chart-{name} g.mark-line > path[stroke]").count() == 5
        assert tab.locator(f"#chart-{name} g.mark-area > path").count() == 3
        points = tab.locator(f"#chart-{name} g.mark-symbol > path").count()
        assert points == sum(len(c.rounds) for c in shown.curves) == 5 * 6
    cells = tab.locator("#chart-participation g.mark-rect > path").count()
    assert cells == 6 * 5  # each of 6 rounds selects 5 clients
    assert tab.title() == "Client selection on digits"


def test_the_legend_switches_highlights_by_mouse_and_keyboard(tab):
    labels = "[...document.querySelectorAll('#chart-accuracy-rounds text')]"
    pressed = tab.locator("[data-run][aria-pressed=true]")
    first = pressed.all_inner_texts()
    assert len(first) == 3
    pressed.first.click()
    tab.wait_for_function(f"run => !{labels}.some(t => t.textContent == run)", arg=first[0])
    assert tab.locator("#chart-accuracy-rounds g.mark-area > path").count() == 2
    last = tab.locator("[data-run]").last
    last.focus()
    tab.keyboard.press("Enter")
    arg = last.inner_text()
    tab.wait_for_function(f"run => {labels}.some(t => t.textContent == run)", arg=arg)
    assert last.get_attribute("aria-pressed") == "true"
    last.click()
    tab.get_by_role("button", name=first[0], exact=True).click()
    assert pressed.all_inner_texts() == first


def test_the_table_sorts_numbers_and_names(tab):
    def column(position):
        return tab.locator(f"tbody tr > :nth-child({position + 1})").all_inner_texts()

    headers = tab.locator("thead th")
    names = [text.strip() for text in headers.all_inner_texts()]
    accuracy, sent = names.index("accuracy %"), names.index("MB down")
    assert headers.nth(accuracy).get_attribute("aria-sort") == "descending"
    values = [float(text.split()[0]) for text in column(accuracy)]
    assert values == sorted(values, reverse=True)
    headers.nth(0).get_by_role("button").click()
    assert column(0) == sorted(column(0))
    headers.nth(0).get_by_role("button").press("Enter")
    assert column(0) == sorted(column(0), reverse=True)
    headers.nth(sent).get_by_role("button").click()
    values = [float(text.replace(",", "")) for text in column(sent)]
    assert values == sorted(values)


def test_hovering_shows_values(tab):
    chart = tab.locator("#chart-accuracy-rounds svg.marks")
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    tab.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    tip = tab.locator("#vg-tooltip-element.visible")
    tip.wait_for(timeout=120_000)
    assert re.search(r"accuracy:?\s*\d+\.\d%", tip.inner_text())


def test_light_and_dark(opened):
    background = "getComputedStyle(document.body).backgroundColor"
    tab = opened(color_scheme="dark")
    assert tab.evaluate(background) == "rgb(20, 24, 29)"
    tab.get_by_role("button", name="Light theme").click()
    tab.wait_for_function(f"() => {background} == 'rgb(255, 255, 255)'")
    tab.get_by_role("button", name="Dark theme").wait_for()


def test_a_phone_needs_no_sideways_scrolling_and_shows_labels_whole_and_apart(opened):
    tab = opened(viewport={"width": 360, "height": 800})
    assert tab.evaluate("document.documentElement.scrollWidth") <= 360
    boxes_of = """figure => [figure.querySelector("svg"),
      ...[...figure.querySelectorAll("g.mark-text text")].filter(t =>
        t.getAttribute("font-weight") === "600")].map(e => {
          const b = e.getBoundingClientRect();
          return [b.left, b.top, b.right, b.bottom];
        })"""
    for name in ACCURACY:
        edge, *boxes = tab.locator(f"#chart-{name}").evaluate(boxes_of)
        assert len(boxes) == 4  # three runs and the baseline
        for i, a in enumerate(boxes):
            assert a[2] <= edge[2] + 0.5, name
            for b in boxes[:i]:
                apart = a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] + 3 or b[3] <= a[1] + 3
                assert apart, name


def test_the_reader_chooses_whose_selections_are_shown(tab):
    cells = "[...document.querySelectorAll('#chart-participation g.mark-rect > path')]"
    drawn = f"{cells}.map(p => p.getAttribute('d')).join()"
    before, choice = tab.evaluate(drawn), tab.get_by_label("Selections of")
    first = choice.input_value()
    choice.select_option("uniform")
    tab.wait_for_function(f"old => {drawn} != old", arg=before)
    choice.select_option(first)
    tab.wait_for_function(f"old => {drawn} == old", arg=before)


def test_screen_readers_find_names_for_everything(tab, comparison_folder):
    named = tab.locator("figure[aria-labelledby] svg[role=img][aria-label]").count()
    assert named == tab.locator("figure").count() == 5
    assert tab.get_by_role("region", name="Results of all runs").count() == 1
    assert tab.get_by_role("main").count() == 1
    assert tab.locator("button:not([aria-label])").evaluate_all("b => b.every(x => x.innerText)")
    for figure in run_figures(Content(read(comparison_folder))):
        assert "24 clients, split shards (per_client=2)" in figure.caption
        assert "2 seeds" in figure.caption


def test_a_hostile_client_id_is_text(opened, comparison_folder, tmp_path, told):
    folder = tmp_path / "runs" / HOSTILE.replace("/", "")  # the name of the run, too
    shutil.copytree(comparison_folder / "uniform", folder)
    for name in ("rounds.jsonl", "federation.json"):
        text = (folder / name).read_text()
        (folder / name).write_text(text.replace('"client-07"', json.dumps(HOSTILE)))
    (folder / "checkpoint").unlink()
    path = tmp_path / "report.html"
    told("report", tmp_path / "runs", "-o", path)
    tab = opened(path)
    assert tab.title() == "Client selection on digits"
    assert tab.locator("script").count() == 3  # data, Vega, ours
    assert tab.locator("main img").count() == 0
    assert tab.locator("tbody th").all_inner_texts() == [HOSTILE.replace("/", "")]


def test_a_run_before_its_first_round_and_one_without_time_are_shown(
    comparison_folder, tmp_path, told
):
    folder = tmp_path / "uniform"
    shutil.copytree(comparison_folder / "uniform", folder)
    rounds = (folder / "rounds.jsonl").read_text()
    timeless = re.sub(r'"(seconds|elapsed)": [\d.e-]+', r'"\1": 0.0', rounds)
    for text in ("", timeless):
        (folder / "rounds.jsonl").write_text(text)
        told("report", folder, "-o", tmp_path / "r.html")
        assert "uniform, 1 run" in told("show", folder)


def test_no_character_of_a_name_ends_the_process():
    """vl-convert aborts where an SVG cannot hold a character, so this runs in another process."""
    code = (
        "import altair as alt\nfrom fedcohort.report.figures import Figure, render\n"
        "chart = alt.Chart(alt.NamedData('rows')).mark_bar().encode(x='name:N', y='n:Q')\n"
        "for odd in ('\\x1b[2J', '\\ufffe', '\\uffff', '\\ud800'):\n"
        "    rows = {'rows': [{'name': odd, 'n': 1}]}\n"
        "    render(Figure('x', odd, odd, chart, rows), '.svg').decode()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-500:]


def test_figures_and_markdown(comparison_folder, tmp_path, told):
    out, figures = tmp_path / "report.md", tmp_path / "figures"
    told("report", comparison_folder, "-o", out, "--figures", figures)
    text = out.read_text()
    assert "| policy | accuracy % | against uniform |" in text
    linked = re.findall(r"!\[.*?\]\((.*?)\)", text)
    assert len(linked) == 5
    for name in linked:
        assert (tmp_path / name).read_text().startswith("<svg")
        stem = name.rsplit("/", 1)[1].removesuffix(".svg")
        assert (figures / f"{stem}.svg").exists()
        assert (figures / f"{stem}.png").read_bytes()[:4] == b"\x89PNG"


def test_the_page_is_closed_to_the_network(report):
    text = report.read_text(encoding="utf-8")
    assert "default-src 'none'" in text
    assert "unsafe-eval" not in text.split("</head>")[0]
    assert not re.search(r"<(script|link|img|iframe)[^>]+(src|href)=", text.split("<script")[0])
