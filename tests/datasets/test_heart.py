from __future__ import annotations

import numpy as np
import pytest

from fedcohort.datasets import load
from fedcohort.datasets.heart import FEATURES
from fedcohort.exceptions import DataError

HEART_ROW = "63.0,1.0,4.0,145.0,233.0,1.0,2.0,150.0,0.0,2.3,3.0,0.0,6.0,"


def write_heart(root):
    folder = root / "heart-disease"
    folder.mkdir(parents=True)
    for hospital in ("cleveland", "hungarian", "switzerland", "va"):
        rows = [HEART_ROW + str(i % 5) for i in range(12)]
        rows[3] = "50,0,1,?,0,?,0,140,1,1,?,?,?,0"
        (folder / f"processed.{hospital}.data").write_text("\n".join(rows) + "\n")
    return folder


def test_heart_features_by_hand(tmp_path):
    write_heart(tmp_path)
    data = load("heart-disease", tmp_path)
    assert len(data.y) + len(data.y_test) == 44  # one of twelve rows is incomplete
    assert len(FEATURES) == data.x.shape[1] == 13
    row = dict(zip(FEATURES, data.x[0].tolist(), strict=True))
    assert row == pytest.approx(
        {
            "age": 1.3, "sex": 1.0, "trestbps": 0.75, "chol": 0.33, "fbs": 1.0, "thalach": 0.4,
            "exang": 0.0, "oldpeak": 1.3, "cp=2": 0.0, "cp=3": 0.0, "cp=4": 1.0,
            "restecg=1": 0.0, "restecg=2": 1.0,
        }
    )  # fmt: skip
    raw = load("heart-disease", tmp_path, scale=False)
    assert raw.x[0, :4] == pytest.approx([63, 1, 145, 233])


def test_heart_clients_and_split(tmp_path):
    write_heart(tmp_path)
    data = load("heart-disease", tmp_path, complete=False)
    assert data.client_ids is not None
    assert data.test_client_ids is not None
    assert np.unique(data.client_ids, return_counts=True)[1].tolist() == [8, 8, 8, 8]
    assert np.unique(data.test_client_ids).tolist() == [
        "cleveland",
        "hungarian",
        "switzerland",
        "va",
    ]
    everything = np.concatenate([data.x, data.x_test])
    incomplete = everything[everything[:, 0] == 0.0]  # aged 50
    assert len(incomplete) == 4
    assert incomplete[0, 2] == incomplete[0, 4] == 0.0  # missing: at the center
    # num of 1 to 4 is a disease: rows 0, 3, 5, 10 of each twelve are healthy
    assert int((np.concatenate([data.y, data.y_test]) == 0).sum()) == 16


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "it is empty"),
        ("1,2,3\n", "row 1 has 3 columns"),
        (HEART_ROW + "5\n", "column 14 of row 1 is 5"),
        (HEART_ROW + "?\n", "column 14 of row 1 is nan"),
        (HEART_ROW.replace("63.0", "old") + "0\n", "'old'"),
        (HEART_ROW.replace("63.0", "inf") + "0\n", "infinite"),
        (HEART_ROW.replace("63.0,1.0,4.0", "63.0,1.0,7") + "0\n", "column 3 of row 1 is 7"),
        (HEART_ROW.replace("63.0,1.0", "63.0,2") + "0\n", "column 2 of row 1 is 2"),
        ("x" * (1 << 20) + "x", "longer than"),
    ],
)
def test_damaged_heart_files(content, message, tmp_path):
    (write_heart(tmp_path) / "processed.va.data").write_text(content)
    with pytest.raises(DataError, match=message) as caught:
        load("heart-disease", tmp_path)
    assert "processed.va.data is damaged" in str(caught.value)
