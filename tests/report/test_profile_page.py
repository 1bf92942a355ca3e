"""The page of a profile: whole, closed to the network, legible, the same at every width."""

from __future__ import annotations

import base64
import hashlib
import re

import numpy as np
import pytest

from fedcohort.analysis.heterogeneity import measure
from fedcohort.files.marginals import ColumnGap
from fedcohort.report.figures import client_map, distances_to_all, matrix
from fedcohort.report.page import profile_page
from fedcohort.sketch.race import RaceSketch


def mark(name, distance, tip="", place=(0.0, 0.0)):
    around = {"distance": distance, "low": distance / 2, "high": distance * 1.5}
    where = {"x": place[0], "y": place[1], "outlier": True}
    return {"name": name, **around, **where, "color": "#123456", "tip": tip}


def profile(clients, names=None, kinds=3):
    """Gaussians around one of several means, as sketches of one site each."""
    rng = np.random.default_rng(0)
    empty, made = RaceSketch.srp(8, rows=10, bits=4), []
    for i in range(clients):
        made.append(empty.empty_like())
        made[-1].add(rng.normal(size=(60, 8)) + 2 * np.eye(8)[i % kinds])
    return measure(made, names or [f"site-{i}" for i in range(clients)])


@pytest.mark.parametrize("clients", [2, 12, 300])
def test_the_page_is_whole_and_loads_nothing(clients):
    shown = profile(clients)
    html = profile_page(shown)
    links = re.findall(r"""(?:href|src)=["']?([^"' >]+)""", html)
    assert all(link == "#results" for link in links)
    assert not re.search(r"<(?:link|iframe|object|img)|https?:|@import|url\((?!#p)", html)
    assert "nan" not in re.sub(r"base64,[^\"]+", "", html.split("<script")[0]).lower()
    for client in shown.clients:
        assert f">{client.name}</th>" in html
        assert f"{client.distance:.4f}" in html
    assert html.count("<svg") == 3
    assert len(html) < 1_000_000  # the matrix of many clients is one of averages


def test_hostile_names_stay_text(browser):
    bad = ['<script>alert("1")</script>', "a&b'\"><img src=x onerror=alert(1)>", "x" * 300, "[red]"]
    html = profile_page(profile(4, bad), "</title><script>")
    (script,) = re.findall(r"<script[^>]*>(.*?)</script>", html, re.S)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in html
    tab = browser.new_page()
    tab.on("dialog", lambda dialog: pytest.fail(dialog.message))
    tab.set_content(html)
    assert tab.locator("img").count() == 0
    assert sorted(tab.locator("tbody th").all_inner_texts()) == sorted(bad)
    tab.close()


def test_the_columns_that_differ_are_in_sight_and_a_phone_needs_no_sideways_scrolling(browser):
    shown = profile(12, [f"hospital-of-somewhere-{i}" for i in range(12)])
    gap = ColumnGap("age", 1e-9, True, "higher by about 12")
    shown = shown._replace(columns={c.name: [gap] for c in shown.clients})
    tab = browser.new_page(viewport={"width": 1280, "height": 900})
    tab.set_content(profile_page(shown))
    cell = tab.get_by_role("cell", name="age, higher by about 12").first
    box, table = cell.bounding_box(), tab.locator(".scroll").bounding_box()
    assert box["x"] + box["width"] <= table["x"] + table["width"]
    assert tab.locator("[data-shown]").inner_text() == "12 of 12"
    tab.get_by_label("Search: Clients").fill("nowhere")
    assert tab.locator("[data-shown]").inner_text() == "0 of 12"
    for width in (400, 320):
        tab.set_viewport_size({"width": width, "height": 800})
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
    tab.close()


def test_a_matrix_of_few_clients_has_their_names_and_colors():
    svg = matrix(np.array([[0.0, 0.5], [0.5, 0.0]]), ["ann", "bob"], ["#112233", "#445566"])
    shown = (">ann<", ">bob<", "#112233", "#445566", "<title>ann, bob: 0.500</title>")
    assert all(text in svg for text in shown)


def test_marks_have_tooltips_and_pictures_have_ids_of_their_own():
    marks = [mark("ann", 1.0, "ann: 1 < 2")]
    first, second = distances_to_all(marks, 0.1), distances_to_all(marks, 0.1)
    assert "<title>ann: 1 &lt; 2</title>" in first
    assert not {*re.findall(r'id="([^"]+)"', first)} & {*re.findall(r'id="([^"]+)"', second)}


def test_pictures_of_equal_values_are_drawn():
    marks = [mark(name, 0.0) for name in "ab"]
    for drawn in (distances_to_all(marks, 0.0), client_map(marks, True)):
        assert "nan" not in drawn.lower() and "inf" not in drawn


def test_names_of_many_outliers_do_not_overlap():
    rng = np.random.default_rng(3)
    places = rng.normal(size=(200, 2)) * 1e-3
    marks = [mark(f"hospital-number-{i}", 1.0, place=place) for i, place in enumerate(places)]
    drawn = client_map(marks, True)
    text = r'text-anchor="(\w+)" transform="translate\(([\d.-]+),([\d.-]+)\)"[^>]*>(hosp[^<]+)<'
    boxes = []
    for anchor, x, y, name in re.findall(text, drawn):
        long = 6.2 * len(name)
        left = float(x) - {"start": 0, "middle": long / 2, "end": long}[anchor]
        boxes.append((left, float(y) - 9, left + long, float(y) + 2))
    assert boxes
    for i, a in enumerate(boxes):
        for b in boxes[:i]:
            wide, high = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
            assert min(wide, high) <= 0.1
