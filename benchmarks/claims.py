"""Claims of papers 0, 1, 3 and 4 that are not about accuracy; run by the suite "papers".

    python benchmarks/claims.py separation --seeds 0 1 --out result.json

separation: paper 0, Figure 1. Five subsets of MNIST with Dirichlet labels (A), five uniform ones
(B): sketch distances within A, within B and between them.
total-variation: paper 0, Figure 4. Sketch distance against the exact total variation of Gaussians
in 16 dimensions.
median: paper 0, Theorem 3.3. Error of the kernel density by rows, with the median over rows that
Algorithm 4 prints, the median of means that the theorem names, and the mean.
private-error: paper 0, Theorem 3.4. Error of the kernel density that a private sketch gives,
against the exact one, over epsilon, rows and samples.
covariance: paper 3, Figure 3. Cosine of the covariances of loss changes ten rounds apart, each
estimated from many random cohorts that start at the same model.
embedding: paper 3, Figure 7. Cosines of the embeddings that FedCor has learned after its warm-up,
of clients with the same label and of others.
reward: paper 1, Figure 5. Mean reward of the clients that FedACS selects, and of random ones.
initialization: paper 4, Figures 4 and 5. Profiles and kernels of 20 clients under four ways to draw
the first model.
"""

from __future__ import annotations

import argparse
import itertools
import math

import numpy as np
from provenance import write
from scipy.spatial.distance import pdist

from fedcohort.datasets import federate, load
from fedcohort.numerics.dpp import similarity_kernel
from fedcohort.policies import FedACS, FedCor, Uniform
from fedcohort.rounds import stream
from fedcohort.signals.catalog import Needs
from fedcohort.simulate import LocalTraining, Schedule, Simulation, build
from fedcohort.simulate.local import Job, Trainer
from fedcohort.simulate.models import INITS
from fedcohort.sketch.distances import distance_matrix
from fedcohort.sketch.race import RaceSketch, distance
from fedcohort.sketch.transforms import Transform

BITS = 6


def separation(args):
    data = load("mnist", args.root)
    return [{"seed": seed, **separated(data, seed)} for seed in args.seeds]


def separated(data, seed, size=2000, alpha=0.5, rows=1000):
    rng = stream(seed, "separation")
    by_class = [np.flatnonzero(data.y == c) for c in range(data.classes)]
    center = Transform(center=round(float(data.x.mean()), 2))
    dim = int(np.prod(data.sample_shape))
    sketches = []
    for group in range(10):
        mix = rng.dirichlet(np.full(data.classes, alpha)) if group < 5 else np.full(10, 0.1)
        counts = rng.multinomial(size, mix)
        chosen = [rng.choice(own, n) for own, n in zip(by_class, counts, strict=True)]
        sketch = RaceSketch.srp(dim, rows=rows, bits=BITS, seed=seed, transform=center)
        sketch.add(data.x[np.concatenate(chosen)].reshape(-1, dim))
        sketches.append(sketch)
    d = distance_matrix(sketches, debias=False)
    upper, between = np.triu_indices(5, 1), d[:5, 5:]
    a, b = d[:5, :5][upper], d[5:, 5:][upper]
    found = {"within A": a.mean(), "within A, smallest": a.min(), "A to B": between.mean()}
    found |= {"within B": b.mean(), "within B, largest": b.max()}
    spread = (between.std(axis=1) / between.mean(axis=1)).max()
    found |= {"A to B, relative spread over B": spread}
    return {name: float(value) for name, value in found.items()}


def total_variation(args):
    from scipy.stats import spearmanr

    rows = []
    for seed in args.seeds:
        exact, estimates, distances = np.transpose(
            simulate_gaussians(40, stream(seed, "gaussians"))
        )
        error = float(np.abs(estimates - exact).mean())
        rank = float(spearmanr(exact, distances)[0])
        rows.append({"seed": seed, "rank correlation": rank, "plug-in error": error})
    return rows


def gaussian_tvd(shift):
    """Total variation of two Gaussians of unit covariance whose means differ by `shift`.

    2 Phi(length / 2) - 1; the paper prints the formula without the half.
    """
    return math.erf(float(np.linalg.norm(shift)) / 2 / math.sqrt(2))


def density(sketch, points, groups=1):
    """Kernel density of the sketched data at points: the median of the means of groups of rows.

    The kernel is the probability to meet in a row. The mean over all rows estimates its density
    without bias; with as many groups as rows it is the median of paper 0's Algorithm 4.
    """
    rows = np.arange(sketch.rows)[:, None]
    values = sketch.normalized()[rows, sketch.family.codes(points)]
    return np.median([part.mean(axis=0) for part in np.array_split(values, groups)], axis=0)


def plug_in(a, b, points):
    """The integral of |p - q| / 2 by Monte Carlo, with kernel densities in place of p and q.

    `points` are as many of a's distribution as of b's, whose mixture is then the proposal.
    """
    p, q = density(a, points), density(b, points)
    both = p + q
    return float(np.mean(np.abs(p - q)[both > 0] / both[both > 0]))


def simulate_gaussians(pairs, rng, dim=16, samples=1000, spread=2.0, rows=200, bits=10):
    """Exact total variation, plug-in estimate and distance of pairs of Gaussians (appendix C.1).

    The difference of the means has a random direction and a length that is uniform from 0 to
    `spread`. A constant column lets hyperplanes miss the origin.
    """
    out = []
    for seed in range(pairs):
        shift = rng.standard_normal(dim)
        shift *= rng.uniform(0, spread) / np.linalg.norm(shift)
        draws = rng.standard_normal((2, 2, samples, dim + 1))  # sketched and fresh, of a and b
        draws[:, 1, :, :dim] += shift
        draws[..., dim] = 2.0
        a = RaceSketch.srp(dim + 1, rows=rows, bits=bits, seed=seed)
        b = a.empty_like()
        a.add(draws[0, 0])
        b.add(draws[0, 1])
        estimate = plug_in(a, b, draws[1].reshape(-1, dim + 1))
        out.append((gaussian_tvd(shift), estimate, distance(a, b)))
    return out


def median(args):
    data = load("mnist", args.root)
    x = (data.x.reshape(len(data.x), -1) - round(float(data.x.mean()), 2)).astype(np.float32)
    n, sizes = 8000, (89, 500, 2000)
    rows = []
    for seed in args.seeds:
        order = stream(seed, "median").permutation(len(x))
        asked, held = x[order[:200]], x[order[200 : 200 + n]]
        truth, points = kernel(asked, held), []
        for count in sizes:
            sketch = RaceSketch.srp(x.shape[1], rows=count, bits=BITS, seed=seed)
            sketch.add(held)
            groups = {"median": count, "median of 9 means": 9, "mean": 1}
            errors_by = {k: _rms(density(sketch, asked, g) - truth) for k, g in groups.items()}
            points.append({"rows": count, **errors_by})
        rows.append({"seed": seed, "n": n, "points": points})
    return rows


def private_error(args):
    data = load("mnist", args.root)
    x = (data.x.reshape(len(data.x), -1) - round(float(data.x.mean()), 2)).astype(np.float32)
    sizes = (500, 2000, 8000, 32_000)
    largest = sizes[-1]
    grid = [(n, 20, 1.0) for n in sizes]
    grid += [(largest, 20, epsilon) for epsilon in (0.25, 0.5, 2.0, 4.0)]
    grid += [(largest, rows, 1.0) for rows in (5, 10, 40, 80, 160)]
    grid += [(n, int(np.sqrt(n)), 1.0) for n in sizes]
    return [{"seed": seed, "points": errors(x, grid, seed)} for seed in args.seeds]


def errors(x, grid, seed, queries=200):
    """Root mean squares: private against exact counts, counts against the kernel."""
    rng = stream(seed, "private-error")
    order = rng.permutation(len(x))
    asked = x[order[:queries]]
    exact, out = {}, []
    for n, rows, epsilon in dict.fromkeys(grid):
        held = x[order[queries : queries + n]]
        sketch = RaceSketch.srp(x.shape[1], rows=rows, bits=BITS, seed=seed)
        sketch.add(held)
        private = sketch.privatize(epsilon, rng=stream(seed, "noise", n, rows, epsilon))
        if n not in exact:
            exact[n] = kernel(asked, held)
        plain, noisy, truth = density(sketch, asked), density(private, asked), exact[n]
        errors_by = {"noise": _rms(noisy - plain), "hashing": _rms(plain - truth)}
        errors_by |= {"all": _rms(noisy - truth), "density": float(truth.mean())}
        out.append({"n": n, "rows": rows, "epsilon": epsilon, **errors_by})
    return out


def kernel(a, b):
    """Exact mean collision probability (1 - angle / pi) ** BITS of each row of a with all of b."""
    a, b = (v / np.linalg.norm(v, axis=1, keepdims=True) for v in (a, b))
    cosine = np.clip(a @ b.T, -1, 1)
    return ((1 - np.arccos(cosine) / np.pi) ** BITS).mean(axis=1)


def _rms(values):
    return float(np.sqrt(np.mean(np.square(values))))


def covariance(args):
    data = load("fashion-mnist", args.root).standardized()
    cohorts, times = 400, (20, 30, 60, 70, 150, 160)
    rows = []
    for seed in args.seeds:
        clients = federate(data, "shards", clients=100, seed=seed, per_client=1)
        changes = loss_changes(clients, times, cohorts, seed, args.device)
        pairs = list(zip(times[::2], times[1::2], strict=True))
        row = {"seed": seed, "cohorts": cohorts}
        for name, measure in (("cosine", cosine), ("without noise", cosine_without_noise)):
            row[name] = {f"{a} to {b}": measure(changes[a], changes[b]) for a, b in pairs}
        row["same label"] = [same_label(np.cov(changes[t].T), clients) for t in times[::2]]
        rows.append(row)
    return rows


def loss_changes(clients, times, cohorts, seed, device):
    """All clients' loss changes over one round, (cohorts, clients), at each of the times."""
    schedule = Schedule(0.5, (150, 300))
    local = LocalTraining(epochs=3, batch_size=64, lr=0.005, schedule=schedule)
    shape, classes = clients.dataset.sample_shape, clients.dataset.classes
    options = {"cohort_size": 10, "local": local, "device": device, "evaluate_every": 0}
    model = build("mlp-64-30", shape, classes, seed=seed)
    training = Simulation(clients, model, Uniform(), seeds=(seed,), **options)
    probes = tuple(range(10**6, 10**6 + cohorts))  # cohorts and batches of their own
    probe = Simulation(clients, model, Uniform(), seeds=probes, **options)
    found = {}
    for number in range(max(times) + 1):
        if number in times:
            start = training.seeds[0].model.clone()
            for one in probe.seeds:
                one.model = start.clone()
            probe.round_number = number
            before = losses(training, start)
            probe.step()
            found[number] = np.array([losses(training, one.model) - before for one in probe.seeds])
        training.step()
    return found


def losses(simulation, model):
    """Mean loss of a model on each client's data."""
    trainer, parts = simulation.trainer, simulation.seeds[0].federation.parts
    jobs = [Job(0, parts[c]) for c in simulation.seeds[0].clients]
    return trainer.losses(model, jobs, simulation.train_data)


def cosine(a, b):
    """Cosine of two covariance matrices, each estimated from rows of samples."""
    a, b = np.cov(a.T), np.cov(b.T)
    return float((a * b).sum() / np.linalg.norm(a) / np.linalg.norm(b))


def cosine_without_noise(a, b):
    """The same, with squared norms estimated as products of two independent halves.

    A matrix that is estimated from few samples has too large a norm, so the plain cosine is too
    small even if both matrices are the same. Products of independent estimates have no such bias.
    """
    (a1, a2), (b1, b2) = ([np.cov(half.T) for half in np.array_split(m, 2)] for m in (a, b))
    across = ((a1 + a2) * (b1 + b2)).sum() / 4
    return float(across / np.sqrt((a1 * a2).sum() * (b1 * b2).sum()))


def same_label(matrix, clients):
    """Mean correlation of clients with the same label, and of those with another."""
    labels = clients.label_counts().argmax(axis=1)
    scale = np.sqrt(np.diag(matrix))
    correlation = matrix / np.outer(scale, scale)
    same = labels[:, None] == labels
    np.fill_diagonal(same, False)
    other = labels[:, None] != labels
    return {"same": float(correlation[same].mean()), "other": float(correlation[other].mean())}


def embedding(args):
    data = load("fashion-mnist", args.root).standardized()
    local = LocalTraining(epochs=3, batch_size=64, lr=0.005)
    simulation = Simulation(
        lambda seed: federate(data, "shards", clients=100, seed=seed, per_client=1),
        lambda seed: build("mlp-64-30", data.sample_shape, data.classes, seed=seed),
        FedCor(warmup=15),
        cohort_size=10,
        local=local,
        seeds=args.seeds,
        device=args.device,
        evaluate_every=0,
    )
    for _ in range(16):
        simulation.step()
    return [{"seed": one.seed, **embedded(one)} for one in simulation.seeds]


def embedded(seed):
    """How alike the embeddings of clients with the same label are, and of others."""
    state, clients = seed.session.policy.state, seed.federation
    labels = clients.label_counts().argmax(axis=1)
    label = dict(zip(clients.clients, labels.tolist(), strict=True))
    own = np.array([label[c] for c in state.clients])
    x = state.embedding / np.linalg.norm(state.embedding, axis=0)
    alike = x.T @ x
    same = own[:, None] == own
    np.fill_diagonal(same, False)
    np.fill_diagonal(alike, -2)
    return {
        "same": float(alike[same].mean()),
        "other": float(alike[own[:, None] != own].mean()),
        "nearest has the same label": float((own[alike.argmax(axis=1)] == own).mean()),
    }


class WatchedUniform(Uniform):
    """Uniform cohorts whose distances from the mean update are recorded, as FedACS needs them."""

    needs = Needs(reply=frozenset({"update_distance"}))


def reward(args):
    data = load("cifar10", args.root).standardized()
    found = {"fedacs": rewards(FedACS(), data, 60, args)}
    found["random"] = rewards(WatchedUniform(), data, 60, args)
    return [
        {"seed": seed, **{name: values[i].tolist() for name, values in found.items()}}
        for i, seed in enumerate(args.seeds)
    ]


def rewards(policy, data, rounds, args):
    """Mean reward of each round's cohort, (seeds, rounds); paper 1, low heterogeneity."""
    options = {"x_med": 0.2, "x_max": 3.0, "samples": 2000}
    simulation = Simulation(
        lambda seed: federate(data, "dirichlet-environment", clients=200, seed=seed, **options),
        lambda seed: build("cifar-cnn", data.sample_shape, data.classes, seed=seed),
        policy,
        cohort_size=10,
        local=LocalTraining(epochs=5, batch_size=400, lr=0.1, epoch_decay=0.9993),
        seeds=args.seeds,
        device=args.device,
        evaluate_every=0,
    )
    found = []
    for _ in range(rounds):
        simulation.step()
        distances = (
            one.session.signals.values("update_distance", one.finished) for one in simulation.seeds
        )
        found.append([-np.mean(values) for values in distances])
    return np.array(found).T


def initialization(args):
    data = load("mnist", args.root).standardized()
    return [{"seed": seed, **initialized(data, seed, args)} for seed in args.seeds]


def initialized(data, seed, args, samples=200):
    """Smallest correlation between entries of two kernels, and between entries of two profiles."""
    parts = federate(data, "skewness", clients=20, seed=seed, xi=1.0).parts
    profiles = {}
    for name in INITS:
        model = build("cnn", data.sample_shape, data.classes, seed=seed, init=name)
        trainer = Trainer(model, device=args.device)
        jobs = [Job(0, rows[:samples]) for c, rows in parts.items()]
        profiles[name] = trainer.features(trainer.flat(), jobs, trainer.data(data.x, data.y))
    kernels = {name: similarity_kernel(pdist(rows)) for name, rows in profiles.items()}
    upper = np.triu_indices(len(parts), 1)
    return {
        "kernels": min(_correlations([k[upper] for k in kernels.values()])),
        "profiles": min(_correlations([p.ravel() for p in profiles.values()])),
    }


def _correlations(vectors):
    return [float(np.corrcoef(a, b)[0, 1]) for a, b in itertools.combinations(vectors, 2)]


CLAIMS = (separation, total_variation, median, private_error)
CLAIMS += (covariance, embedding, reward, initialization)
BY_NAME = {claim.__name__.replace("_", "-"): claim for claim in CLAIMS}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("claim", choices=BY_NAME)
    parser.add_argument("--root", default=None)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    write(args.out, BY_NAME[args.claim](args))


if __name__ == "__main__":
    main()
