"""The page of a profile: whole, closed to the network, legible, the same at every width."""

from __future__ import annotations

import base64
import hashlib
import re

import numpy as np
import pytest

from fedcohort.analysis.heterogeneity import measure
from fedcohort.files.marginals import ColumnGap
from fedcohort.report.page import profile_page
from fedcohort.sketch.race import RaceSketch


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
    assert html.count("<svg") == 2
    ids = re.findall(r'id="([^"]+)"', html)
    assert len(set(ids)) == len(ids)  # those of both pictures
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
    assert "a&amp;b" in re.findall("<title>(.*?)</title>", html)[1]  # a tooltip
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
    for width, media in ((400, "screen"), (320, "screen"), (690, "print")):  # A4 less its margins
        tab.emulate_media(media=media)
        tab.set_viewport_size({"width": width, "height": 800})
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
    tab.close()


def test_equal_clients_are_drawn():
    empty = RaceSketch.srp(8, rows=10, bits=4)
    empty.add(np.ones((50, 8)))
    html = profile_page(measure([empty, empty], ["a", "b"])).split("<script")[0].lower()
    assert "nan" not in html and "infinity" not in html
