"""The converters build files that `load` reads, from small files in the published formats."""

from __future__ import annotations

import json

import numpy as np
from convert import femnist_from_leaf, shakespeare_from_html

from fedcohort.datasets import load
from fedcohort.datasets.published import CHARACTERS


def leaf(folder, parts):
    """Write one of LEAF's files: writer -> list of (pixels as bytes, label)."""
    folder.mkdir(parents=True)
    data = {w: {"x": [(p / 255).tolist() for p, _ in rows], "y": [y for _, y in rows]}
            for w, rows in parts.items()}  # fmt: skip
    held = {"users": list(parts), "num_samples": [], "user_data": data}
    (folder / "all_data_0.json").write_text(json.dumps(held))


def test_femnist_from_leaf(tmp_path):
    rng = np.random.default_rng(0)
    many, few, more = (
        [(rng.integers(0, 256, 784, dtype=np.uint8), int(rng.integers(62))) for _ in range(count)]
        for count in (25, 5, 22)
    )
    # LEAF's first image of a writer is there twice
    leaf(tmp_path / "leaf" / "train", {"f2": many[:20] + many[:1], "f1": few, "f0": more[:20]})
    leaf(tmp_path / "leaf" / "test", {"f2": many[20:] + many[:1], "f0": more[20:]})
    femnist_from_leaf(tmp_path / "leaf", tmp_path / "femnist")
    data = load("femnist", tmp_path)
    assert set(data.client_ids) == {"f0", "f2"}  # f1 has too few
    own, tested = data.client_ids == "f2", data.test_client_ids == "f2"
    train, test = (data.x[own], data.y[own]), (data.x_test[tested], data.y_test[tested])
    for (x, y), rows in ((train, many[:20]), (test, many[20:])):
        assert y.tolist() == [label for _, label in rows]
        assert np.array_equal(x.reshape(-1, 784), np.float32([pixels / 255 for pixels, _ in rows]))


PLAY = """<H3>ACT I</h3><h3>SCENE I. A hall.</h3><blockquote><i>Enter HAMLET</i></blockquote>
<A NAME=speech1><b>Hamlet</b></a><blockquote>
<A NAME=1.1.1>{first}</A><br><A NAME=1.1.2>And   more &amp; more</A><br>
<p><i>He goes</i></p></blockquote>
<A NAME=speech2><b>FIRST WITCH</b></a><blockquote><A NAME=1.1.3>Ay.</A><br></blockquote>"""


def test_shakespeare_from_pages(tmp_path):
    lines = [f"{i} words words words words words" for i in range(12)]
    (tmp_path / "plays" / "hamlet").mkdir(parents=True)
    body = "</A><br><A NAME=1.1.1>".join(lines)
    (tmp_path / "plays" / "hamlet" / "full.html").write_text(PLAY.format(first=body))
    shakespeare_from_html(tmp_path / "plays", tmp_path / "shakespeare")
    data = load("shakespeare", tmp_path)
    assert set(data.client_ids) == {"hamlet/HAMLET"}  # the witch has one line

    def decode(tokens):
        return "".join(("\ufffd" + CHARACTERS)[int(token)] for token in tokens)

    assert decode(data.x[0]) == "\n".join(lines)[:80]
    whole = "\n".join([*lines, "And more & more"])
    assert decode(data.y_test[-1:]) == whole[-1]
