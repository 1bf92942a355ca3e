"""Time per round and per selection: docs/speed.md and the README."""

from __future__ import annotations

from docs_tables.results import result, table


def sketching(cpu):
    """The time of a sketch of MNIST beside other ways, of MinHash, and of distances."""
    r = result(cpu)["result"]
    mnist, pairs, growth = r["mnist"], r["distance matrix"], r["growth with dim"]
    blocked, released = (mnist[f"times faster than {w}"]["wall"] for w in ("blocked", "released"))
    words, integers = (r["minhash"][w]["times faster"]["wall"] for w in ("words", "integers"))
    first, last = growth[0], growth[-1]
    longer = last["fedcohort cpu us a sample"] / first["fedcohort cpu us a sample"]
    return (
        f"A sketch of {mnist['samples']:,} MNIST images with 1,000 rows of 6 bits takes "
        f"{mnist['fedcohort']['wall s']:.2f} s, on "
        f"{'one thread' if r['threads'] == '1' else 'all cores'}: {blocked:.1f} times faster than "
        f"a blocked matrix product with counting, and {released:.1f} times faster than the paper's "
        f"released code. It takes {mnist['memory above data MB']['hashing']:.0f} MB of memory "
        f"beside the data. MinHash is {words:.1f} times faster than datasketch on words and "
        f"{integers:.1f} times on integers. The distances between all pairs of "
        f"{pairs['sketches']:,} such sketches take {pairs['sketches, mmd']['wall s']:.1f} s. The "
        f"cost per sample grows like rows · bits · log(dim): {longer:.0f}-fold from "
        f"{first['dim']:,} to {last['dim']:,} dimensions.\n"
    )


def selection_times(file):
    """Time and memory to select among a thousand and among a million clients."""
    rows = {(r["policy"], r["clients"]): r for r in result(file)["result"]["rounds"]}
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
    """Milliseconds per seed-round of every workload on a GPU, beside the plain loop and pfl."""
    lines = []
    for name, words in WORKLOADS.items():
        held = result(file)["result"][name]
        by_precision = {"float32": [], "tf32": []}
        for row in held["fedcohort"]:
            by_precision[row["precision"]].append((row["seeds"], 1e3 * row["mean_s"]))
        (_, one), *many = by_precision["float32"]
        more, rough = (
            " / ".join(f"{ms:.1f}" + (f" ({n} seeds)" if n > 1 else "") for n, ms in rows) or "-"
            for rows in (many, by_precision["tf32"])
        )
        plain = [1e3 * row["median_s"] for row in held["loop"] if row["precision"] == "float32"]
        others = [*plain, *(1e3 * held[k]["mean_s"] for k in ("pfl",) if k in held)]
        cells = [f"{ms:,.0f} ({ms / one:.0f}x)" for ms in others]
        lines.append([words, f"{one:,.1f}", *cells, *["-"] * (2 - len(cells)), more, rough])
    header = ["workload", "one seed, ms", "plain loop, ms", "pfl 0.6, ms"]
    return table([*header, "more seeds, ms per seed", "TF32"], lines)


ON_CPU = {
    "W1": "W1: MLP, 5 of 100 clients x 600, 5 epochs, evaluation",
    "W2": "W2: CNN of 582,026 parameters, 10 clients, 1 epoch, evaluation",
    "W3": "W3: MLP, 100 of 10,000 clients x 6 samples",
}


def simulation(file):
    """Seconds per round of every engine on a CPU, and peak memory."""
    lines = []
    for name, words in ON_CPU.items():
        engines = result(file)["result"][name]["engines"]
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
