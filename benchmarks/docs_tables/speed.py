"""Time per round and per selection: docs/speed.md and the README."""

from __future__ import annotations

from docs_tables.results import result, table


def sketching(cpu):
    """The time of a sketch of MNIST beside other ways, of MinHash, and of distances."""
    r = result(cpu)["result"]
    mnist, words, integers = r["mnist"], r["minhash"]["words"], r["minhash"]["integers"]
    blocked = mnist["times faster than blocked"]["wall"]
    released = mnist["times faster than released"]["wall"]
    memory, pairs = mnist["memory above data MB"], r["distance matrix"]
    first, last = r["growth with dim"][0], r["growth with dim"][-1]
    more = last["dim"] / first["dim"]
    longer = last["fedcohort cpu us a sample"] / first["fedcohort cpu us a sample"]
    threads = "one thread" if r["threads"] == "1" else "all cores"
    return (
        f"A sketch of {mnist['samples']:,} MNIST images with 1,000 rows of 6 bits takes "
        f"{mnist['fedcohort']['wall s']:.2f} s, on {threads}. "
        f"That is {blocked:.1f} times faster than a blocked matrix product with counting, and "
        f"{released:.1f} times faster than the paper's released code. It takes "
        f"{memory['hashing']:.0f} MB of memory beside the data "
        f"({memory['hashing and compiler']:.0f} MB the first time, when it compiles). MinHash is "
        f"{words['times faster']['wall']:.1f} times faster than datasketch on words and "
        f"{integers['times faster']['wall']:.1f} times on integers.\n\n"
        f"The distances between all pairs of {pairs['sketches']:,} such sketches take "
        f"{pairs['sketches, frobenius']['wall s']:.1f} s, debiased "
        f"{pairs['sketches, mmd']['wall s']:.1f} s.\n\n"
        "The cost per sample grows like rows · bits · log(dim): from "
        f"{first['dim']:,} to {last['dim']:,} dimensions, {more:.0f} times as many, it grows "
        f"{longer:.0f}-fold.\n"
    )


def selection_times(file):
    """Time and memory to select among a thousand and among a million clients."""
    held = result(file)
    rows = {(r["policy"], r["clients"]): r for r in held["result"]["rounds"]}
    lines = []
    for policy in dict.fromkeys(policy for policy, _ in rows):
        small, large = rows[policy, 1_000], rows[policy, 1_000_000]
        slowest = max(large["first_round_s"], large["slowest_later_round_s"])
        cells = [f"{1e3 * small['median_round_s']:.2f}", f"{large['median_round_s']:.2f}"]
        lines.append([policy, *cells, f"{slowest:.1f} s", f"{large['peak_mb']:,.0f}"])
    header = ["policy", "1,000 clients, ms per round", "1,000,000 clients, s per round"]
    return table([*header, "slowest round", "peak MB"], lines)


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
    lines = []
    for name, words in WORKLOADS.items():
        held = found["result"][name]
        rows = {(row["seeds"], row["precision"]): row for row in held["fedcohort"]}
        one = rows[1, "float32"]["mean_s"]
        many = [f"{1e3 * row['mean_s']:.2g} ({n} seeds)" for (n, p), row in rows.items()
                if n > 1 and p == "float32"]  # fmt: skip
        rough = [f"{1e3 * row['mean_s']:.1f}" + (f" ({n} seeds)" if n > 1 else "")
                 for (n, p), row in rows.items() if p == "tf32"]  # fmt: skip
        plain = [row["median_s"] for row in held["loop"] if row["precision"] == "float32"]
        loop = [f"{1e3 * plain[0]:,.0f}", f"{plain[0] / one:.1f}x"] if plain else ["-", "-"]
        cells = [loop[0], f"{1e3 * one:,.1f}", loop[1], *(many or ["-"])]
        lines.append([words, *cells, " / ".join(rough) or "-"])
    header = ["workload", "plain loop, ms", "one seed, ms", "ratio", "more seeds, ms per seed"]
    return table([*header, "TF32"], lines)


def gpu_pfl(file):
    """The ratio to pfl on the workload that its authors published."""
    found = result(file)
    held = found["result"]["pfl-cifar10"]
    (own,) = (row["mean_s"] for row in held["fedcohort"]
              if (row["seeds"], row["precision"]) == (1, "float32"))  # fmt: skip
    theirs, gpu = held["pfl"]["mean_s"], (m := found["provenance"]).get("machine", m)["gpu"]
    return (
        f"The CIFAR-10 workload by which pfl-research compares frameworks takes "
        f"{1e3 * own:.1f} ms per round in float32 on one {gpu}, pfl 0.6 beside it "
        f"{1e3 * theirs:.0f} ms: {theirs / own:.0f} times as long.\n"
    )


ON_CPU = {
    "W1": "W1: MLP, 5 of 100 clients x 600, 5 epochs, evaluation",
    "W2": "W2: CNN of 582,026 parameters, 10 clients, 1 epoch, evaluation",
    "W3": "W3: MLP, 100 of 10,000 clients x 6 samples",
}


def simulation(file):
    """Seconds per round of every engine on a CPU, and peak memory."""
    held = result(file)
    lines = []
    for name, words in ON_CPU.items():
        engines = held["result"][name]["engines"]
        own = engines["fedcohort"]["median_s"]
        others = [engines[e]["median_s"] for e in ("loop", "pfl", "flower")]
        cells = [f"{seconds(s)} ({s / own:.1f}x)" for s in others]
        memory = " / ".join(f"{engines[e]['peak_mb']:,}" for e in ("fedcohort", "flower"))
        lines.append([words, seconds(own), *cells, f"{memory} MB"])
    header = ["workload", "fedcohort", "plain loop", "pfl 0.6", "Flower (Ray)"]
    return table([*header, "memory, ours / Flower"], lines)


def seconds(value):
    return f"{1e3 * value:.0f} ms" if value < 1 else f"{value:.2f} s"


def ray_scaling(file):
    """Vectors per second and the time of a sweep, by workers."""
    r = result(file)["result"]
    lines = [
        [name, f"{r[name]['vectors/s']:,}", f"{r[name]['sweep s']:.2f}"]
        for name in ("one process", "1 worker", "2 workers")
    ]
    words = f"\nSketches: {r['sketch']}. Sweep: {r['sweep']}.\n"
    return table(["", "vectors per second", "seconds of a sweep"], lines) + words
