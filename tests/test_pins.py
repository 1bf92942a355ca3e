"""Behavior that moving code must not change: cohorts, hashes, bytes and files.

Expected values are in `tests/pins/pins.json`. After an intended change of behavior, write them anew
and read the diff::

    python tests/test_pins.py --write

Readings and data are made from SHA-256 and whole numbers, so that values depend neither on the
library's own test helpers nor on the machine. Floats are compared to 1e-5.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import math
import sys
import tempfile
import zipfile
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from fedcohort import POLICIES, Session, storage
from fedcohort.datasets import federate, load
from fedcohort.gates import GATES, SketchToSkip
from fedcohort.rounds import History
from fedcohort.simulate import LocalTraining, Simulation, build
from fedcohort.sketch.race import RaceSketch

sys.path.insert(0, str(Path(__file__).parent / "pins"))
from pinned_sketches import FILES, SKETCHES, sketch_file, sketched

PINS = Path(__file__).parent / "pins" / "pins.json"
CLIENTS = tuple(f"c{i:02d}" for i in range(20))
COHORT = 5


def own(registry):
    """Names of what the library itself registers; examples in the docs register more."""
    return sorted(n for n, made in registry.items() if made.__module__.startswith("fedcohort."))


# Policies in a session, on made-up readings.

# Each policy as it is by default, and the ways in which it differs most.
VARIANTS = {
    "clustered-sampling, similarity": ("clustered-sampling", {"by": "similarity"}),
    "clustered-sampling, profiles": (
        "clustered-sampling",
        {"by": "similarity", "signal": "feature_profile"},
    ),
    "divfl, coverage": ("divfl", {"weights": "coverage"}),
    "divfl, sketches": ("divfl", {"signal": "race_sketch"}),
    "divfl, updates": ("divfl", {"signal": "update_sketch"}),
    "fedacs, insight": ("fedacs", {"reward": "insight"}),
    "fedcor, short warm-up": ("fedcor", {"warmup": 3, "interval": 2}),
    "fedcor, gradient": ("fedcor", {"warmup": 2, "fit": "gradient"}),
    "kdpp, sketches": ("kdpp", {"signal": "race_sketch"}),
    "kdpp, features": ("kdpp", {"kernel": "features"}),
    "oort, no exploration": ("oort", {"exploration": 0.2}),
    "power-of-choice, 15": ("power-of-choice", {"d": 15}),
    "race-softmax, pooled": ("race-softmax", {"center": "pooled", "distance": "row-l2"}),
    "sketch-match, random": ("sketch-match", {"pool": "random", "turns": 2}),
    "sketch-to-select, often": ("sketch-to-select", {"interval": 2}),
}


def shares(count, *parts):
    """Numbers in [0, 1) that are a function of `parts`, exact in 32 bits."""
    text = "/".join(map(str, parts))
    blocks = (hashlib.sha256(f"{text}#{i}".encode()).digest() for i in range(-(-count // 8)))
    return np.frombuffer(b"".join(blocks), "<u4")[:count] / 2.0**32


def reading(name, client, number, options):
    """Make up a reading of any signal, of the size that the policy's options ask for."""
    if name == "num_examples":
        return 1 + int(100 * shares(1, name, client)[0])
    if name == "race_sketch":
        rows, buckets = options["rows"], 2 ** options["bits"]
        form = np.dtype([("n", "f8"), ("noise", "f8"), ("counts", "i2", (rows, buckets))])
        sketch = np.zeros((), form)
        sketch["n"] = n = 5 + int(45 * shares(1, name, client)[0])
        low, width = shares(2, name, client, "where")
        drawn = shares(rows * n, name, client, "samples").reshape(rows, n)
        for row, place in enumerate((low + width * drawn) % 1):
            filled = np.bincount((buckets * place).astype(int), minlength=buckets)
            sketch["counts"][row] = filled
        return sketch
    if name in ("loss", "loss_rms", "duration", "update_distance"):
        return float(0.5 + shares(1, name, client)[0] + shares(1, name, client, number)[0] / 4)
    size = options.get("k", 6)
    vector = shares(size, name, client) + shares(size, name, client, number) / 4 - 0.625
    return vector.astype(np.float32)


def drive(session, rounds):
    """Run rounds; in every third one the first client of the cohort does not finish."""
    selections = []
    for _ in range(rounds):
        number = session.round_number

        def answer(name, clients, number=number):
            options = session.policy.signal_options.get(name, {})
            return {c: reading(name, c, number, options) for c in clients}

        selection = session.begin(CLIENTS, answer)
        finished = selection.clients[1 if number % 3 == 1 else 0 :]
        replies = {name: answer(name, finished) for name in session.policy.needs.reply}
        session.finish(replies, finished)
        selections.append(selection)
    return selections


def in_session(name, options):
    session = Session(POLICIES[name](**options), cohort_size=COHORT, seed=7, model_bytes=1000)
    selections = drive(session, 6)
    weights = [s.weights for s in selections]
    return {
        "cohorts": [" ".join(s.clients) for s in selections],
        "weights": None if weights == [None] * 6 else [w and rounded(w) for w in weights],
        **traffic(session),
    }


def traffic(session):
    return {way: dict(sorted(session.ledger.by_kind(way).items())) for way in ("up", "down")}


def rounded(values):
    return [round(float(v), 6) for v in values]


# Policies and gates in the simulator.

SIMULATED = {
    "clustered-sampling, similarity": ("clustered-sampling", {"by": "similarity"}),
    "fedcor, short warm-up": ("fedcor", {"warmup": 2}),
    "kdpp, sketches": ("kdpp", {"signal": "race_sketch"}),
    "race-softmax, private": ("race-softmax", {"epsilon": 2.0}),
}
GATED = {
    "sketch-to-skip, threshold": {"threshold": 0.2, "k": 20},
    "sketch-to-skip, client": {"threshold": 0.25, "k": 20, "mode": "client", "on_skip": "reset"},
}
LOCAL = LocalTraining(epochs=3, batch_size=16, lr=0.1)


@cache
def federation():
    return federate(load("digits"), "shards", clients=20, seed=0)


def settings(policy):
    model = build("mlp-64-30", (1, 8, 8), classes=10, seed=0)
    options = {"cohort_size": COHORT, "local": LOCAL, "device": "cpu", "seeds": (3,)}
    return (federation(), model, policy), options


def in_simulator(name, options):
    policy = POLICIES[name](**options)
    history, session = simulated(policy, 3)
    return {"cohorts": [" ".join(s) for s in history.selections], **traffic(session)}


def simulated(policy, rounds):
    arguments, options = settings(policy)
    simulation = Simulation(*arguments, **options)
    history = History(3, [simulation.step()[0] for _ in range(rounds)])
    return history, simulation.seeds[0].session


def gated(gate, rounds=6):
    arguments, options = settings("uniform")
    simulation = Simulation(*arguments, gate=gate, evaluate_every=0, **options)
    records = [simulation.step()[0] for _ in range(rounds)]
    return {
        "cohorts": [" ".join(r.selected) for r in records],
        "finished": [" ".join(r.finished) for r in records],
        "skipped": [r.skipped for r in records],
        **traffic(simulation.seeds[0].session),
    }


def whole_run():
    history, _ = simulated(POLICIES["uniform"](), 3)
    return {
        "cohorts": [" ".join(s) for s in history.selections],
        "accuracy": rounded(history.accuracy),
        "loss": rounded(r.loss for r in history.rounds),
        "bytes": [[r.bytes_up, r.bytes_down] for r in history.rounds],
        "seconds": rounded(r.elapsed for r in history.rounds),
    }


# Checkpoints.


def plain_state():
    """All kinds of values that a checkpoint takes."""
    return {
        "none": None,
        "numbers": [1, -2.5, 1e300, True, np.int64(3), np.float32(0.5)],
        "text": "naïve ☃\n",
        "nested": {"__array__": {"": ()}, "list": [[], {}, [{"x": np.arange(3, dtype=np.int16)}]]},
        "arrays": [np.eye(2, dtype=np.float32), np.zeros((0, 3)), np.array(True)],
        "columns": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "record": np.array([(1, 2.0)], [("n", "<i4"), ("x", "<f8")]),
    }


def session_state(name, gate=None, **options):
    session = Session(
        POLICIES[name](**options), cohort_size=COHORT, seed=7, model_bytes=1000, gate=gate
    )
    drive(session, 3)
    return session.state_dict()


# Policies whose state holds nothing that a BLAS library could round in another way.
CHECKPOINTS = {
    "plain values": plain_state,
    "uniform with a gate": lambda: session_state("uniform", SketchToSkip(0.1, k=4)),
    "oort": lambda: session_state("oort"),
    "fedcor in warm-up": lambda: session_state("fedcor"),
    "fedacs": lambda: session_state("fedacs"),
    "power-of-choice": lambda: session_state("power-of-choice"),
    "clustered-sampling": lambda: session_state("clustered-sampling"),
    "sketch-match": lambda: session_state("sketch-match"),
}


def members(make):
    """Pin the members of the zip file; the file itself holds the time at which it was written."""
    with tempfile.TemporaryDirectory() as folder:
        storage.save(f"{folder}/state", make())
        with zipfile.ZipFile(f"{folder}/state") as archive:
            found = {
                entry.filename: archive.read(entry)
                for entry in archive.infolist()
                if entry.compress_type == zipfile.ZIP_STORED
            }
            assert len(found) == len(archive.infolist())
    out = {name: hashlib.sha256(content).hexdigest() for name, content in found.items()}
    if make is plain_state:  # kept whole, so that a later version can be asked to read it
        out = {name: base64.b64encode(content).decode() for name, content in found.items()}
    return out


# What is computed, by section and case.


def cases():
    plain = {name: (name, {}) for name in own(POLICIES)}
    gates = {name: (name,) for name in own(GATES)}
    gates["cmfl"] = ("cmfl", 3)  # in the fourth round a client is within rounding of the threshold
    gates |= {name: (SketchToSkip(**options),) for name, options in GATED.items()}
    return {
        "session": {k: (in_session, *v) for k, v in (plain | VARIANTS).items()},
        "simulator": {k: (in_simulator, *v) for k, v in (plain | SIMULATED).items()},
        "gates": {k: (gated, *v) for k, v in gates.items()},
        "run": {"uniform": (whole_run,)},
        "sketches": {k: (sketched, v) for k, v in SKETCHES.items()},
        "sketch files": {k: (sketch_file, v) for k, v in FILES.items()},
        "checkpoints": {k: (members, v) for k, v in CHECKPOINTS.items()},
    }


CASES = cases()
EXPECTED = json.loads(PINS.read_text("utf-8")) if PINS.exists() else {}


def compute(section, case):
    function, *arguments = CASES[section][case]
    return function(*arguments)


def differences(found, expected, where=""):
    """Say where two trees of plain values differ; floats may by 1e-5."""
    if isinstance(found, dict) and isinstance(expected, dict):
        if list(found) != list(expected):
            return [f"{where}: {list(found)} is not {list(expected)}"]
        pairs = [(k, found[k], expected[k]) for k in found]
    elif isinstance(found, list) and isinstance(expected, list) and len(found) == len(expected):
        pairs = [(i, a, b) for i, (a, b) in enumerate(zip(found, expected, strict=True))]
    elif isinstance(found, float) and isinstance(expected, float):
        same = math.isclose(found, expected, rel_tol=1e-5, abs_tol=1e-5)
        return [] if same else [f"{where}: {found} is not {expected}"]
    else:
        same = type(found) is type(expected) and found == expected
        return [] if same else [f"{where}: {found!r} is not {expected!r}"]
    return [text for key, a, b in pairs for text in differences(a, b, f"{where}/{key}")]


@pytest.mark.parametrize(
    ("section", "case"), [(section, case) for section in CASES for case in CASES[section]]
)
def test_pinned(section, case):
    found, expected = compute(section, case), dict(EXPECTED[section][case])
    if section == "sketch files" and _body(found) != _body(expected):
        # Another zlib may pack the same counts in other bytes; `sketch_file` checked its own.
        for key in ("file", "sha256"):
            del found[key], expected[key]
    assert not differences(found, expected)


def _body(pinned):
    data = base64.b64decode(pinned["file"])
    return data[18 + len(pinned["header"].encode()) : -32]


def test_everything_that_is_pinned_is_still_there():
    assert {s: sorted(c) for s, c in CASES.items()} == {s: sorted(c) for s, c in EXPECTED.items()}


@pytest.mark.parametrize("case", FILES)
def test_a_pinned_sketch_file_can_be_read(case):
    data = base64.b64decode(EXPECTED["sketch files"][case]["file"])
    assert RaceSketch.from_bytes(data) == FILES[case]()


def test_a_pinned_checkpoint_can_be_read(tmp_path):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in EXPECTED["checkpoints"]["plain values"].items():
            archive.writestr(name, base64.b64decode(content))
    (tmp_path / "old").write_bytes(buffer.getvalue())
    storage.save(tmp_path / "new", plain_state())
    old, new = storage.load(tmp_path / "old"), storage.load(tmp_path / "new")
    assert repr(old) == repr(new)
    assert old["nested"]["list"][2][0]["x"].tolist() == [0, 1, 2]


def text_of(value, depth=0):
    """Return JSON with a line for each value of a case, so that a diff can be read."""
    if depth == 3 or not isinstance(value, dict):
        return json.dumps(value, ensure_ascii=False)
    pad = "  " * (depth + 1)
    lines = [f"{pad}{json.dumps(k)}: {text_of(v, depth + 1)}" for k, v in value.items()]
    return "{\n" + ",\n".join(lines) + "\n" + pad[2:] + "}"


def write():
    """Write all expected values, and say which changed."""
    computed = {s: {case: compute(s, case) for case in CASES[s]} for s in CASES}
    for section, found in computed.items():
        for case in found:
            was = EXPECTED.get(section, {}).get(case)
            if was is None or differences(found[case], was):
                print(f"{'new' if was is None else 'changed'}: {section}, {case}")
    PINS.parent.mkdir(exist_ok=True)
    PINS.write_text(text_of(computed) + "\n", "utf-8")


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit("usage: python tests/test_pins.py --write")
    write()
