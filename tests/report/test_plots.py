from __future__ import annotations

import pytest

from fedcohort.report.plots import draw_curves
from fedcohort.report.tables import Curve

CURVES = [
    Curve(f"policy {i}", [1, 2, 3], [1.0, 2.0, 3.0], [0.1, 0.2, i / 20], [0.0] * 3, [1.0] * 3)
    for i in range(14)
]


@pytest.mark.parametrize("count", [1, 4, 14])
@pytest.mark.parametrize("over", ["rounds", "megabytes"])
def test_a_picture_is_drawn(tmp_path, count, over):
    path = tmp_path / "curves.png"
    draw_curves(CURVES[:count], path, over=over, target=0.5, title="x")
    assert path.read_bytes()[:4] == b"\x89PNG"
    draw_curves(CURVES[:count], tmp_path / "curves.svg", over=over)
    assert all(c.policy in (tmp_path / "curves.svg").read_text() for c in CURVES[:count])
