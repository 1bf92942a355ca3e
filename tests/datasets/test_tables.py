"""Heart disease and Shakespeare's plays."""

from __future__ import annotations

import numpy as np
import pytest

from fedcohort.datasets import load
from fedcohort.datasets.published import CHARACTERS, HEART_FEATURES, TOKENS, encode
from fedcohort.exceptions import ConfigError, DataError


def decode(tokens):
    return "".join(("\ufffd" + CHARACTERS)[int(token)] for token in tokens)


def test_heart_features_clients_and_split(published, tmp_path):
    published("heart-disease")
    data = load("heart-disease", tmp_path)
    assert len(data.y) + len(data.y_test) == 44  # one of twelve rows is incomplete
    assert len(HEART_FEATURES) == data.x.shape[1] == 13
    assert dict(zip(HEART_FEATURES, data.x[0].tolist(), strict=True)) == pytest.approx(
        {
            "age": 1.3, "sex": 1.0, "trestbps": 0.75, "chol": 0.33, "fbs": 1.0, "thalach": 0.4,
            "exang": 0.0, "oldpeak": 1.3, "cp=2": 0.0, "cp=3": 0.0, "cp=4": 1.0,
            "restecg=1": 0.0, "restecg=2": 1.0,
        }
    )  # fmt: skip
    names = ["cleveland", "hungarian", "switzerland", "va"]
    assert np.unique(data.client_ids, return_counts=True)[1].tolist() == [7, 7, 7, 7]
    assert np.unique(data.test_client_ids).tolist() == names
    # num of 1 to 4 is a disease: rows 0, 5 and 10 of each twelve are healthy
    assert int((np.concatenate([data.y, data.y_test]) == 0).sum()) == 12


def test_damaged_heart_files_are_named(published, tmp_path):
    folder, row = published("heart-disease"), published.heart
    damaged = {
        "empty": "",
        "row 1": "1,2,3\n",
        "column 14 of row 1 is nan": row + "?\n",
        "'old'": row.replace("63.0", "old") + "0\n",
        "infinite": row.replace("63.0", "inf") + "0\n",
        "column 3 of row 1 is 7": row.replace("63.0,1.0,4.0", "63.0,1.0,7") + "0\n",
    }
    for culprit, content in damaged.items():
        (folder / "processed.va.data").write_text(content)
        with pytest.raises(DataError, match=rf"processed\.va\.data is damaged.*{culprit}"):
            load("heart-disease", tmp_path)


HEADER = "play\tspeaker\tline_id\ttext"


def plays(*roles):
    """Lines of (play, speaker, number of lines, length of a line), one role after the other."""
    letters = "".join(c for c in CHARACTERS if c != "\n")
    rows = [HEADER]
    for play, speaker, lines, length in roles:
        for i in range(lines):
            text = "".join(letters[(i + k) % len(letters)] for k in range(length))
            rows.append(f"{play}\t{speaker}\t1.1.{i}\t{text}")
    return "\n".join(rows) + "\n"


def test_the_vocabulary_has_80_tokens():
    assert TOKENS == 80
    assert encode(CHARACTERS).tolist() == list(range(1, 80))
    assert decode(encode("naïve \U0001f600")) == "na\ufffdve \ufffd"


def test_windows_and_the_character_that_follows(published, tmp_path):
    text = plays(
        ("hamlet", "HAMLET", 12, 30), ("hamlet", "OPHELIA", 10, 9), ("lear", "FOOL", 9, 40)
    )
    published("shakespeare", text)
    data = load("shakespeare", tmp_path, max_samples=None)
    # HAMLET speaks 12 x 30 + 11 = 371 characters: 291 samples, 29 for testing.
    # OPHELIA speaks 10 x 9 + 9 = 99: 19 and 1. FOOL has nine lines.
    assert data.client_ids.tolist() == ["hamlet/HAMLET"] * 262 + ["hamlet/OPHELIA"] * 18
    assert data.test_client_ids.tolist() == ["hamlet/HAMLET"] * 29 + ["hamlet/OPHELIA"]
    speech = "\n".join(row.split("\t")[3] for row in text.splitlines()[1:13])
    for start in (0, 1, 100, 261):
        assert decode(data.x[start]) == speech[start : start + 80]
        assert decode(data.y[start : start + 1]) == speech[start + 80]
    assert decode(data.x_test[28]) == speech[-81:-1]
    assert decode(data.y_test[28:29]) == speech[-1]


def test_max_samples_are_spread_over_the_text(published, tmp_path):
    published("shakespeare", plays(("hamlet", "HAMLET", 50, 40)))
    whole = load("shakespeare", tmp_path, max_samples=None)
    some = load("shakespeare", tmp_path, max_samples=20)
    assert (len(some.y), len(some.y_test)) == (18, 2)
    windows = 50 * 41 - 1 - 80
    everything = np.concatenate([whole.x, whole.x_test])
    assert np.array_equal(some.x, everything[[i * windows // 20 for i in range(18)]])
    with pytest.raises(ConfigError, match="max_samples=0"):
        load("shakespeare", max_samples=0)


@pytest.mark.parametrize(
    ("text", "culprit"),
    [
        ("play,speaker,line_id,text\n", "first line"),
        (HEADER + "\na\tb\tc\n", "line 2"),
        (HEADER.encode() + b"\na\tb\tc\t\xff\n", "UTF-8"),
        (plays(("a", "B", 3, 50)), "10 lines"),
        (plays(("a", "B", 10, 3)), "80 characters"),
    ],
)
def test_damaged_plays_are_named(text, culprit, published, tmp_path):
    published("shakespeare", text)
    with pytest.raises(DataError, match=rf"plays\.tsv\.gz is damaged.*{culprit}"):
        load("shakespeare", tmp_path)
