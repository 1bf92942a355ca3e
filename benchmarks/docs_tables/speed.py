"""Time per round and per selection: docs/speed.md and the README."""

from __future__ import annotations

import numpy as np
from docs_tables.results import NOT_RUN, result, table


def selection_growth(file):
    """Exponents of the time to select over the number of clients, fitted from 10,000 clients on."""
    held = result(file)
    by_policy = {}
    for row in held["result"]["rounds"]:
        if row["clients"] >= 10_000:
            by_policy.setdefault(row["policy"], []).append((row["clients"], row["median_round_s"]))
    lines = []
    for policy, points in by_policy.items():
        clients, seconds = np.log(np.array(points).T)
        lines.append([policy, f"{np.polyfit(clients, seconds, 1)[0]:.2f}"])
    return table(["policy", "time to select grows as clients to the power"], lines)


def dpp_set_up(file):
    """After how many draws our k-DPP is ahead of DPPy, set-up counted."""
    d = result(file)["result"]["k_dpp"]
    more, saved = d["setup_s"] - d["dppy_setup_s"], d["dppy_draw_s"] - d["draw_s"]
    draws = max(1, int(np.ceil(more / saved)))
    return (
        f"A k-DPP draw of {d['k']} of {d['clients']:,} takes {1e3 * d['draw_s']:.2f} ms after a "
        f"set-up of {d['setup_s']:.2f} s; DPPy takes {1e3 * d['dppy_draw_s']:.1f} ms after "
        f"{d['dppy_setup_s']:.2f} s. With set-up we are ahead after {draws} draws.\n"
    )


WORKLOADS = {
    "pfl-cifar10": "pfl's CIFAR-10 network: 50 clients x 50 images, batch 10, dropout",
    "fedcor": "FedCor's CIFAR network: 5 clients x 500 images x 5 epochs, batch 50",
    "W1": "MLP 784-64-30-10: 5 clients x 600 samples x 5 epochs, batch 64",
    "char-lstm": "char-LSTM 256: 3 clients x 400 windows x 20 epochs, batch 10",
    "resnet18": "ResNet-18 with group norm: 10 clients x 500 images, batch 32",
    "vit-tiny": "ViT-tiny: 10 clients x 500 images, batch 32",
}


def gpu_rounds(file):
    """Milliseconds per seed-round of every workload on a GPU, beside the plain loop."""
    found = result(file)
    if found is None:
        return NOT_RUN
    lines = []
    for name, words in WORKLOADS.items():
        held = found["result"].get(name)
        if held is None:
            continue
        rows = {(row["seeds"], row["precision"]): row for row in held["fedcohort"]}
        one = rows[1, "float32"]["mean_s"]
        many = [f"{1e3 * row['mean_s']:.1f} ({n} seeds)" for (n, p), row in rows.items()
                if n > 1 and p == "float32"]  # fmt: skip
        rough = [f"{1e3 * row['mean_s']:.1f}" for (_, p), row in rows.items() if p == "tf32"]
        plain = [row["median_s"] for row in held["loop"] if row["precision"] == "float32"]
        loop = [f"{1e3 * plain[0]:,.0f}", f"{plain[0] / one:.1f}x"] if plain else ["-", "-"]
        cells = [loop[0], f"{1e3 * one:,.1f}", loop[1], *(many or ["-"])]
        lines.append([words, *cells, " / ".join(rough) or "-"])
    header = ["workload", "plain loop", "one seed", "ratio", "more seeds, per seed", "TF32"]
    return table(header, lines)


def gpu_kernels(file):
    """Where a round's time goes: outside of kernels, and in which."""
    found = result(file)
    if found is None:
        return NOT_RUN
    lines = []
    for name, words in WORKLOADS.items():
        for row in found["result"].get(name, {"fedcohort": []})["fedcohort"]:
            if row["precision"] != "float32" or "kernels_ms" not in row:
                continue
            top = [f"`{key.split('(')[0].split('<')[0].removeprefix('void ')}` "
                   f"{100 * ms / row['kernels_ms']:.0f} %"
                   for key, _, ms in row["top_kernels"][:4]]  # fmt: skip
            wall = 1e3 * row["median_s"] * row["seeds"]
            cells = [str(row["seeds"]), f"{wall:.1f}", f"{row['kernels_ms']:.1f}"]
            lines.append([words.split(":")[0], *cells, f"{row['launches']:,}", ", ".join(top)])
    header = ["workload", "seeds", "ms per round", "ms in kernels", "kernels", "most of it"]
    return table(header, lines)


def gpu_sketches(file):
    """The time of the sketches of several seeds on a GPU."""
    held = result(file) and result(file)["result"].get("sketches")
    if not held:
        return NOT_RUN
    return (
        f"The sketches of {held['clients']} clients under {held['seeds']} seeds, of "
        f"{held['images']:,} images each time, take {held['median_s']:.2f} s on the same GPU.\n"
    )


def gpu_pfl(file):
    """The ratio to pfl on the workload that its authors published."""
    found = result(file)
    held = found and found["result"].get("pfl-cifar10", {})
    if not held or "pfl" not in held:
        return NOT_RUN
    (own,) = (row["mean_s"] for row in held["fedcohort"]
              if (row["seeds"], row["precision"]) == (1, "float32"))  # fmt: skip
    theirs, gpu = held["pfl"]["mean_s"], found["provenance"]["machine"]["gpu"]
    return (
        f"The CIFAR-10 workload by which pfl-research compares frameworks takes "
        f"{1e3 * own:.0f} ms per round in float32 on one {gpu}, pfl 0.6 beside it "
        f"{1e3 * theirs:.0f} ms: {theirs / own:.0f} times as long.\n"
    )
