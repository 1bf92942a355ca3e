"""Claims of papers 0, 1, 3 and 4 that are not about accuracy; run by the suite "papers".

    python benchmarks/claims.py separation --seeds 0 1 --out result.json

separation: paper 0, Figure 1. Five subsets of MNIST with Dirichlet labels (A), five uniform ones
(B): sketch distances within A, within B and between them.
total-variation: paper 0, Figure 4. Sketch distance, plug-in estimate and calibrated estimate
against the exact total variation of Gaussians in 16 dimensions.
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

import math

import numpy as np
from provenance import write
from scipy.spatial.distance import pdist
from scipy.stats import spearmanr
from script import arguments

from fedcohort.datasets import federate, load
from fedcohort.numerics.dpp import similarity_kernel
from fedcohort.policies import FedACS, FedCor, Uniform
from fedcohort.rounds import stream
from fedcohort.signals.catalog import Needs
from fedcohort.simulate import LocalTraining, Schedule, Simulation, build
from fedcohort.simulate.local import Job, Trainer
from fedcohort.simulate.models import INITS
from fedcohort.sketch.distances import distance, distance_matrix
from fedcohort.sketch.race import RaceSketch
from fedcohort.sketch.transforms import Transform
from fedcohort.sketch.uncertainty import total_variation as calibrated

BITS = 6


def separation(seed, device, size=2000, alpha=0.5, rows=1000):
    data, rng = load("mnist"), stream(seed, "separation")
    by_class = [np.flatnonzero(data.y == c) for c in range(data.classes)]
    center, sketches = Transform(center=round(float(data.x.mean()), 2)), []
    for group in range(10):
        mix = rng.dirichlet(np.full(data.classes, alpha)) if group < 5 else np.full(10, 0.1)
        counts = rng.multinomial(size, mix)
        chosen = [rng.choice(own, n) for own, n in zip(by_class, counts, strict=True)]
        sketch = RaceSketch.srp(784, rows=rows, bits=BITS, seed=seed, transform=center)
        sketch.add(data.x[np.concatenate(chosen)].reshape(-1, 784))
        sketches.append(sketch)
    d = distance_matrix(sketches, debias=False)
    upper, between = np.triu_indices(5, 1), d[:5, 5:]
    a, b = d[:5, :5][upper], d[5:, 5:][upper]
    spread = (between.std(axis=1) / between.mean(axis=1)).max()
    found = {"within A": a.mean(), "within A, smallest": a.min(), "A to B": between.mean()}
    found |= {"within B": b.mean(), "within B, largest": b.max()}
    found |= {"A to B, relative spread over B": spread}
    return {name: float(value) for name, value in found.items()}


def total_variation(seed, device):
    """Of pairs of Gaussians, as in appendix C.1.

    The difference of the means has a random direction and a length that is uniform from 0 to 2. A
    constant column lets hyperplanes miss the origin. With unit covariance, the exact one is
    2 Phi(length / 2) - 1; the paper prints the formula without the half.
    """
    rng, pairs = stream(seed, "gaussians"), []
    for i in range(40):
        shift = rng.standard_normal(16)
        shift *= rng.uniform(0, 2) / np.linalg.norm(shift)
        draws = rng.standard_normal((2, 2, 1000, 17))  # sketched and fresh, of a and b
        draws[:, 1, :, :16] += shift
        draws[..., 16] = 2.0
        a = RaceSketch.srp(17, rows=200, bits=10, seed=i)
        b = a.empty_like()
        a.add(draws[0, 0])
        b.add(draws[0, 1])
        exact = math.erf(float(np.linalg.norm(shift)) / 2 / math.sqrt(2))
        estimate = plug_in(a, b, draws[1].reshape(-1, 17))
        pairs.append((exact, distance(a, b), estimate, *calibrated(a, b)))
    exact, distances, estimates, values, low, high = np.transpose(pairs)
    found = {"rank correlation": spearmanr(exact, distances)[0]}
    found |= {"plug-in error": np.abs(estimates - exact).mean()}
    found |= {"calibrated error": np.abs(values - exact).mean()}
    found |= {"inside the interval": ((low <= exact) & (exact <= high)).mean()}
    return {name: float(value) for name, value in found.items()}


def plug_in(a, b, points):
    """The integral of |p - q| / 2 by Monte Carlo, with kernel densities in place of p and q.

    `points` are as many of a's distribution as of b's, whose mixture is then the proposal.
    """
    p, q = density(a, points), density(b, points)
    both = p + q
    return float(np.mean(np.abs(p - q)[both > 0] / both[both > 0]))


def density(sketch, points, groups=1):
    """Kernel density of the sketched data at points: the median of the means of groups of rows.

    The kernel is the probability to meet in a row. The mean over all rows estimates its density
    without bias; with as many groups as rows it is the median of paper 0's Algorithm 4.
    """
    rows = np.arange(sketch.rows)[:, None]
    values = sketch.normalized()[rows, sketch.family.codes(points)]
    return np.median([part.mean(axis=0) for part in np.array_split(values, groups)], axis=0)


def median(seed, device, n=8000, sizes=(89, 500, 2000)):
    x = shuffled_mnist(seed, "median")
    asked, held = x[:200], x[200 : 200 + n]
    truth, points = kernel(asked, held), []
    for rows in sizes:
        sketch = sketched(held, rows, seed)
        groups = {"median": rows, "median of 9 means": 9, "mean": 1}
        errors = {way: rms(density(sketch, asked, g) - truth) for way, g in groups.items()}
        points.append({"rows": rows, **errors})
    return {"n": n, "points": points}


def private_error(seed, device):
    """Root mean squares: private against exact counts, counts against the kernel."""
    sizes = *_, most = (500, 2000, 8000, 32_000)
    grid = [(n, 20, 1.0) for n in sizes]
    grid += [(most, 20, epsilon) for epsilon in (0.25, 0.5, 2.0, 4.0)]
    grid += [(most, rows, 1.0) for rows in (5, 10, 40, 80, 160)]
    grid += [(n, int(np.sqrt(n)), 1.0) for n in sizes]
    x = shuffled_mnist(seed, "private-error")
    asked, held = x[:200], x[200:]
    exact, points = {n: kernel(asked, held[:n]) for n in sizes}, []
    for n, rows, epsilon in dict.fromkeys(grid):
        sketch = sketched(held[:n], rows, seed)
        private = sketch.privatize(epsilon, rng=stream(seed, "noise", n, rows, epsilon))
        plain, noisy, truth = density(sketch, asked), density(private, asked), exact[n]
        errors = {"noise": rms(noisy - plain), "hashing": rms(plain - truth)}
        errors |= {"all": rms(noisy - truth), "density": float(truth.mean())}
        points.append({"n": n, "rows": rows, "epsilon": epsilon, **errors})
    return {"points": points}


def shuffled_mnist(seed, name):
    x = load("mnist").x
    x = (x.reshape(len(x), -1) - round(float(x.mean()), 2)).astype(np.float32)
    return x[stream(seed, name).permutation(len(x))]


def sketched(x, rows, seed):
    sketch = RaceSketch.srp(x.shape[1], rows=rows, bits=BITS, seed=seed)
    sketch.add(x)
    return sketch


def kernel(a, b):
    """Exact mean collision probability (1 - angle / pi) ** BITS of each row of a with all of b."""
    a, b = (v / np.linalg.norm(v, axis=1, keepdims=True) for v in (a, b))
    cosine = np.clip(a @ b.T, -1, 1)
    return ((1 - np.arccos(cosine) / np.pi) ** BITS).mean(axis=1)


def rms(values):
    return float(np.sqrt(np.mean(np.square(values))))


def covariance(seed, device, cohorts=400, times=(20, 30, 60, 70, 150, 160)):
    data = load("fashion-mnist").standardized()
    clients = federate(data, "shards", clients=100, seed=seed, per_client=1)
    labels = clients.label_counts().argmax(axis=1)
    changes = loss_changes(clients, times, cohorts, seed, device)
    pairs, row = list(zip(times[::2], times[1::2], strict=True)), {"cohorts": cohorts}
    for name, measure in (("cosine", cosine), ("without noise", cosine_without_noise)):
        row[name] = {f"{a} to {b}": measure(changes[a], changes[b]) for a, b in pairs}
    row["same label"] = [by_label(np.corrcoef(changes[t].T), labels) for t in times[::2]]
    return row


def loss_changes(clients, times, cohorts, seed, device):
    """All clients' loss changes over one round, (cohorts, clients), at each of the times."""
    schedule = Schedule(0.5, (150, 300))
    local = LocalTraining(epochs=3, batch_size=64, lr=0.005, schedule=schedule)
    main = training(clients, "mlp-64-30", Uniform(), local, seed, device)
    probes = tuple(range(10**6, 10**6 + cohorts))  # cohorts and batches of their own
    options = {"cohort_size": 10, "local": local, "device": device, "evaluate_every": 0}
    probe = Simulation(clients, main.model(0), Uniform(), seeds=probes, **options)
    jobs = [Job(0, rows) for rows in clients.parts.values()]

    def losses(model):
        return main.trainer.losses(model, jobs, main.train_data)

    changes = {}
    for number in range(max(times) + 1):
        if number in times:
            start = main.seeds[0].model.clone()
            for one in probe.seeds:
                one.model = start.clone()
            probe.round_number, before = number, losses(start)
            probe.step()
            changes[number] = np.array([losses(one.model) - before for one in probe.seeds])
        main.step()
    return changes


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


def by_label(matrix, labels):
    """Mean of the pairs with the same label, and of those with others."""
    same = labels[:, None] == labels
    other = ~same
    np.fill_diagonal(same, False)
    return {"same": float(matrix[same].mean()), "other": float(matrix[other].mean())}


def embedding(seed, device):
    """How alike the embeddings of clients with the same label are, and of others."""
    data = load("fashion-mnist").standardized()
    clients = federate(data, "shards", clients=100, seed=seed, per_client=1)
    local, policy = LocalTraining(epochs=3, batch_size=64, lr=0.005), FedCor(warmup=15)
    simulation = training(clients, "mlp-64-30", policy, local, seed, device)
    for _ in range(16):
        simulation.step()
    label = dict(zip(clients.clients, clients.label_counts().argmax(axis=1), strict=True))
    state = simulation.seeds[0].session.policy.state
    labels = np.array([label[c] for c in state.clients])
    x = state.embedding / np.linalg.norm(state.embedding, axis=0)
    alike = x.T @ x
    nearest = labels[(alike - 4 * np.eye(len(alike))).argmax(axis=1)]
    same = float((nearest == labels).mean())
    return by_label(alike, labels) | {"nearest has the same label": same}


def training(clients, model, policy, local, seed, device):
    """A simulation with cohorts of ten that is not evaluated."""
    data, options = clients.dataset, {"seeds": (seed,), "device": device, "evaluate_every": 0}
    first = build(model, data.sample_shape, data.classes, seed=seed)
    return Simulation(clients, first, policy, cohort_size=10, local=local, **options)


class WatchedUniform(Uniform):
    """Uniform cohorts whose distances from the mean update are recorded, as FedACS needs them."""

    needs = Needs(reply=frozenset({"update_distance"}))


def reward(seed, device):
    """Mean reward of each round's cohort; paper 1, low heterogeneity."""
    options = {"x_med": 0.2, "x_max": 3.0, "samples": 2000}
    data = load("cifar10").standardized()
    clients = federate(data, "dirichlet-environment", clients=200, seed=seed, **options)
    local = LocalTraining(epochs=5, batch_size=400, lr=0.1, epoch_decay=0.9993)
    rewards = {}
    for name, policy in (("fedacs", FedACS()), ("random", WatchedUniform())):
        simulation, rewards[name] = training(clients, "cifar-cnn", policy, local, seed, device), []
        for _ in range(60):
            simulation.step()
            one = simulation.seeds[0]
            distances = one.session.signals.values("update_distance", one.finished)
            rewards[name].append(-float(np.mean(distances)))
    return rewards


def initialization(seed, device, samples=200):
    """Smallest correlation between entries of two kernels, and between entries of two profiles."""
    data = load("mnist").standardized()
    parts, profiles = federate(data, "skewness", clients=20, seed=seed, xi=1.0).parts, []
    for name in INITS:
        model = build("cnn", data.sample_shape, data.classes, seed=seed, init=name)
        trainer = Trainer(model, device=device)
        jobs = [Job(0, rows[:samples]) for rows in parts.values()]
        profiles.append(trainer.features(trainer.flat(), jobs, trainer.data(data.x, data.y)))
    upper = np.triu_indices(len(parts), 1)
    kernels = [similarity_kernel(pdist(rows))[upper] for rows in profiles]
    vectors = {"kernels": kernels, "profiles": [rows.ravel() for rows in profiles]}
    return {name: float(np.corrcoef(all_of).min()) for name, all_of in vectors.items()}


CLAIMS = (separation, total_variation, median, private_error)
CLAIMS += (covariance, embedding, reward, initialization)


def main():
    args = arguments(__doc__, "claim", seeds=[0], device="auto", out=...)
    measure = {claim.__name__.replace("_", "-"): claim for claim in CLAIMS}[args.claim]
    write(args.out, [{"seed": seed, **measure(seed, args.device)} for seed in args.seeds])


if __name__ == "__main__":
    main()
