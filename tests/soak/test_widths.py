"""Counts of different integer widths end no process, in the simulator and in Flower.

tests/signals/test_forms.py does the same with a session. NumPy 2.0 to 2.4 promote such dtypes to
too few bytes, and about half of the processes died.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CHECK = """
def check(session):
    (column,) = [c for name, c in session.signals._columns.items() if name == "race_sketch"]
    widths = {int(abs(counts).max()) > 32767 for counts in column.values["counts"]}
    assert session.signals.dropped["race_sketch"] == 0
    return len(widths) == 2  # else all sketches have the same width, and nothing was tried
"""

SIMULATOR = """
from fedcohort.datasets import federate, load
from fedcohort.policies import SketchMatch
from fedcohort.simulate import LocalTraining, Simulation, build
data = load("digits")
tried = repeat = 0
while tried < 3:
    repeat += 1
    simulation = Simulation(
        lambda seed: federate(data, "iid", seed=seed, clients=20),
        lambda seed: build("mlp-64-30", data.sample_shape, data.classes, seed=seed),
        lambda: SketchMatch(rows=10, epsilon=EPSILON),
        cohort_size=3, local=LocalTraining(epochs=1), seeds=(repeat,), device="cpu",
    )
    simulation.step()
    tried += check(simulation.sessions[0])
"""

FLOWER = """
from conftest import Digits, identify_process
from flwr.serverapp.strategy import FedAvg
from fedcohort.flower import CohortStrategy
from fedcohort.policies import SketchMatch
identify_process()
digits = Digits()
tried = repeat = 0  # a client draws its noise from the operating system
while tried < 3:
    repeat += 1
    inner = FedAvg(fraction_evaluate=0.0, min_train_nodes=1, min_evaluate_nodes=0,
                   min_available_nodes=1)
    policy = SketchMatch(centered=False, epsilon=EPSILON)
    strategy = CohortStrategy(inner, policy, cohort_size=3, seed=repeat)
    strategy.start(digits.grid(), digits.arrays(), 1)
    tried += check(strategy.session)
"""


def test_sketches_of_mixed_widths_do_not_corrupt_memory():
    """With epsilon .002, about half of the clients have a count that 16 bits cannot hold."""
    flower = str(Path(__file__).parents[1] / "flower")
    code = f"import sys; sys.path.insert(0, {flower!r})\nEPSILON = 0.002\n"
    code += CHECK + SIMULATOR + FLOWER
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
