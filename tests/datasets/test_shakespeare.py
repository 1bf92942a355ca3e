from __future__ import annotations

import gzip

import numpy as np
import pytest

from fedcohort.datasets import load
from fedcohort.datasets.shakespeare import CHARACTERS, CLASSES, decode, encode
from fedcohort.exceptions import ConfigError, DataError


def plays(*roles):
    """Lines of (play, speaker, number of lines, length of a line), one role after the other."""
    letters = "".join(c for c in CHARACTERS if c != "\n")
    rows = ["play\tspeaker\tline_id\ttext"]
    for play, speaker, lines, length in roles:
        for i in range(lines):
            text = "".join(letters[(i + k) % len(letters)] for k in range(length))
            rows.append(f"{play}\t{speaker}\t1.1.{i}\t{text}")
    return "\n".join(rows) + "\n"


def write_shakespeare(root, text):
    folder = root / "shakespeare"
    folder.mkdir(parents=True, exist_ok=True)
    data = text if isinstance(text, bytes) else text.encode()
    (folder / "plays.tsv.gz").write_bytes(gzip.compress(data))
    return folder


def test_the_vocabulary_has_80_tokens():
    assert CLASSES == 80
    assert len(set(CHARACTERS)) == 79
    assert encode(CHARACTERS).tolist() == list(range(1, 80))
    assert decode(encode("To be, or not to be.")) == "To be, or not to be."
    assert decode(encode("naïve \U0001f600")) == "na\ufffdve \ufffd"


def test_windows_and_the_character_that_follows(tmp_path):
    text = plays(
        ("hamlet", "HAMLET", 12, 30), ("hamlet", "OPHELIA", 10, 9), ("lear", "FOOL", 9, 40)
    )
    write_shakespeare(tmp_path, text)
    data = load("shakespeare", tmp_path, max_samples=None)
    # HAMLET speaks 12 x 30 + 11 = 371 characters: 291 samples, 29 for testing.
    # OPHELIA speaks 10 x 9 + 9 = 99: 19 and 1. FOOL has nine lines.
    assert data.client_ids is not None
    assert data.test_client_ids is not None
    assert data.client_ids.tolist() == ["hamlet/HAMLET"] * 262 + ["hamlet/OPHELIA"] * 18
    assert data.test_client_ids.tolist() == ["hamlet/HAMLET"] * 29 + ["hamlet/OPHELIA"]
    assert data.x.dtype == np.int64
    lines = [row.split("\t")[3] for row in text.splitlines()[1:13]]
    speech = "\n".join(lines)
    for start in (0, 1, 100, 261):
        assert decode(data.x[start]) == speech[start : start + 80]
        assert decode(data.y[start : start + 1]) == speech[start + 80]
    assert decode(data.x_test[28]) == speech[-81:-1]
    assert decode(data.y_test[28:29]) == speech[-1]


def test_roles_are_told_apart_by_play_and_lines_kept_in_order(tmp_path):
    rows = ["play\tspeaker\tline_id\ttext"]
    for i in range(10):
        rows += [f"a\tKING\t1.1.{i}\tline {i} of a here", f"b\tKING\t1.1.{i}\tline {i} of b here"]
    write_shakespeare(tmp_path, "\n".join(rows))
    data = load("shakespeare", tmp_path)
    assert data.client_ids is not None
    assert sorted(set(data.client_ids)) == ["a/KING", "b/KING"]
    first = decode(data.x[0])
    assert first.startswith("line 0 of a here\nline 1 of a here\nline 2")


def test_max_samples_are_spread_over_the_text_and_tokens_can_be_bytes(tmp_path):
    write_shakespeare(tmp_path, plays(("hamlet", "HAMLET", 50, 40)))
    whole = load("shakespeare", tmp_path, max_samples=None, dtype="uint8")
    some = load("shakespeare", tmp_path, max_samples=20, dtype="uint8")
    assert whole.x.dtype == some.x.dtype == np.uint8
    assert (len(some.y), len(some.y_test)) == (18, 2)
    windows = 50 * 41 - 1 - 80
    everything = np.concatenate([whole.x, whole.x_test])
    assert np.array_equal(some.x, everything[[i * windows // 20 for i in range(18)]])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("play,speaker,line_id,text\n", "first line is 'play,speaker"),
        ("", "first line is ''"),
        ("play\tspeaker\tline_id\ttext\na\tb\tc\n", "line 2 has 3 fields"),
        (b"play\tspeaker\tline_id\ttext\na\tb\tc\t\xff\n", "not UTF-8"),
        (plays(("a", "B", 3, 50)), "no role has 10 lines"),
        (plays(("a", "B", 10, 3)), "over 80 characters"),
    ],
)
def test_damaged_plays(text, message, tmp_path):
    write_shakespeare(tmp_path, text)
    with pytest.raises(DataError, match=message) as caught:
        load("shakespeare", tmp_path)
    assert "plays.tsv.gz is damaged" in str(caught.value)


def test_shakespeare_options_are_checked(tmp_path):
    for options in ({"min_lines": 0}, {"max_samples": 0}, {"dtype": "float32"}):
        with pytest.raises(ConfigError, match=next(iter(options))):
            load("shakespeare", tmp_path, **options)
