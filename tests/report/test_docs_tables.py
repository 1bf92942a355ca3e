"""A click on a header of a table in the documentation sorts it, in a real browser."""

from __future__ import annotations

from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "docs" / "sort.js"


@pytest.fixture
def sorted_by(browser):
    """Show rows as a table of the site, click on headers, and return the first cells."""
    tab = browser.new_page()

    def sort(rows, *clicks):
        lines = ["".join(f"<td>{cell}</td>" for cell in row) for row in rows]
        body = "".join(f"<tr>{line}</tr>" for line in lines)
        head = "".join(f"<th>{i}</th>" for i in range(len(rows[0])))
        tab.set_content(
            f"<article><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></article>"
        )
        tab.add_script_tag(content=SCRIPT.read_text())
        for column in clicks:
            tab.locator("th").nth(column).click()
        return tab.locator("tbody tr td:first-child").all_inner_texts()

    yield sort
    tab.close()


def test_numbers_by_value_and_text_last(sorted_by):
    rows = [["a", "≥ 1,100.5 ± 3"], ["b", "not in 200"], ["c", "9.5 (2 of 5)"], ["d", "20"]]
    assert sorted_by(rows, 1) == ["c", "d", "a", "b"]
    assert sorted_by(rows, 1, 1) == ["b", "a", "d", "c"]
    assert sorted_by(rows, 1, 0) == ["a", "b", "c", "d"]


def test_groups_stay_together(sorted_by):
    rows = [["x", "3"], ["y", "2"], ["second", ""], ["a", "9"], ["b", "1"]]
    assert sorted_by(rows, 1) == ["y", "x", "second", "b", "a"]
    assert sorted_by(rows, 1, 1) == ["x", "y", "second", "a", "b"]
