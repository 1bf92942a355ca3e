from __future__ import annotations

import importlib.util
import warnings

import numpy as np
import pytest

from fedcohort.exceptions import ConfigError, IncompatibleSketches, NoClients
from fedcohort.personalize import ColdStart, Record, Registry, Search, check
from fedcohort.personalize import search as search_module
from fedcohort.personalize.index import (
    ENERGY_SHARE,
    Compressor,
    Scan,
    SketchTableWriter,
    query_vector,
)
from fedcohort.sketch.distances import Stack
from fedcohort.sketch.errors import distance_with_error
from fedcohort.sketch.race import RaceSketch, distance

needs_faiss = pytest.mark.skipif(
    importlib.util.find_spec("faiss") is None, reason="faiss is not installed"
)
WIDE = RaceSketch.srp(dim=2, rows=80, bits=4, seed=0)  # 1280 cells: longer than the compression


def fill(registry, make, count, *, empty=None, first=0, private=False):
    """Clients at different angles, of different sizes."""
    rng = np.random.default_rng(first)
    sketches = {}
    for i in range(first, first + count):
        options = {} if empty is None else {"empty": empty}
        made = make(rng.uniform(0, 2 * np.pi), i, int(rng.integers(20, 300)), **options)
        if private and i % 2:
            made = made.privatize(3.0, rng=rng)
        sketches[f"c{i}"] = made
    registry.add_many(Record(c, s, reference=c) for c, s in sketches.items())
    return sketches


def ranked_by_hand(query, sketches):
    """Every client by definition, in float64, one by one."""
    score = {}
    for client, other in sketches.items():
        square = distance(query, other, "mmd") * query.rows
        score[client] = square + ENERGY_SHARE * float(Stack([other]).error_variance()[0])
    return sorted(score, key=score.get)


@pytest.mark.parametrize("private", [False, True])
def test_exact_search_is_the_definition(registry, make, private):
    sketches = fill(registry, make, 60, private=private)
    search = Search(registry)
    for seed in range(5):
        query = make(seed, 1000 + seed)
        found = search.nearest(query, k=60)
        assert [f.client for f in found] == ranked_by_hand(query, sketches)
        for near in found[:3]:
            estimate = distance_with_error(query, sketches[near.client], "mmd")
            assert near.squared == pytest.approx(estimate.value * query.rows, abs=1e-12)
            assert near.error == pytest.approx(estimate.error * query.rows)
            assert near.distance == pytest.approx(max(near.squared, 0) ** 0.5)


def test_fewer_neighbors_are_the_first_of_more(registry, make):
    fill(registry, make, 30)
    search = Search(registry)
    query = make(1.0, 99)
    many = search.nearest(query, k=30)
    assert search.nearest(query) == many[:1]
    assert search.nearest(query, k=7) == many[:7]
    assert search.nearest(query, k=1000) == many


def test_the_client_itself_can_be_left_out(registry, make):
    sketches = fill(registry, make, 20)
    search = Search(registry)
    for client, sketch in sketches.items():
        found = search.nearest(sketch, k=19, without=client)
        assert len(found) == 19
        assert client not in {f.client for f in found}


def test_additions_and_removals_are_seen_at_once(registry, make):
    fill(registry, make, 10)
    search = Search(registry)
    query = make(2.0, 77, n=300)
    registry.add("twin", make(2.0, 78, n=300), reference="twin")
    assert search.nearest(query)[0].client == "twin"
    registry.remove("twin")
    assert search.nearest(query)[0].client != "twin"
    for i in range(9):
        registry.remove(f"c{i}")
    assert [f.client for f in search.nearest(query, k=3)] == ["c9"]
    registry.remove("c9")
    with pytest.raises(NoClients, match="no client is registered"):
        search.nearest(query)


@pytest.mark.parametrize("kept", [0, 1000, 1 << 23])
def test_sketches_kept_from_earlier_searches_change_nothing(registry, make, monkeypatch, kept):
    """A search that has answered before, and one that has not, after a sketch was replaced."""
    monkeypatch.setattr(search_module, "KEPT", kept)
    fill(registry, make, 20)
    search, query = Search(registry), make(1.0, 99)
    for _ in range(2):
        assert search.nearest(query, k=20) == Search(registry).nearest(query, k=20)
    nearest = search.nearest(query)[0].client
    registry.add(nearest, make(4.0, 98), reference="x", replace=True)
    assert search.nearest(query, k=20) == Search(registry).nearest(query, k=20)
    (held,) = search.sketches([nearest])
    assert held.counts.tolist() == make(4.0, 98).counts.tolist()
    advices = [ColdStart(registry, search=s).advise(query) for s in (search, Search(registry))]
    assert advices[0] == advices[1]


def test_a_registry_begun_anew_with_other_sketches(registry, make):
    fill(registry, make, 3)
    search = Search(registry)
    for i in range(3):
        registry.remove(f"c{i}")
    fill(registry, make, 3, empty=WIDE, first=10)
    assert search.nearest(make(0.0, 5, empty=WIDE))[0].client.startswith("c1")
    with pytest.raises(IncompatibleSketches, match="the query: hash bits: 4 is not 3"):
        search.nearest(make(0.0, 5))


def test_questions_that_cannot_be_answered(registry, make):
    search = Search(registry)
    with pytest.raises(NoClients):
        search.nearest(make(0.0))
    fill(registry, make, 3)
    with pytest.raises(ConfigError, match="k=0"):
        search.nearest(make(0.0), k=0)
    with pytest.raises(ConfigError, match="the query: a sketch of n=1"):
        search.nearest(make(0.0, n=1))


def test_counts_beyond_16_bits(registry, make):
    big = make(0.0, 0, n=40)
    big.counts, big.n = big.counts * 100_000, big.n * 100_000
    registry.add("small", make(0.0, 1), reference="x")
    registry.add("big", big, reference="x")
    search = Search(registry)
    assert search.recent.counts.dtype == np.int32
    assert search.nearest(big, without=None)[0].client == "big"
    registry.add("later", make(0.0, 2), reference="x")
    assert {f.client for f in search.nearest(big, k=3)} == {"small", "big", "later"}


def test_points_rank_as_sketches_do(make):
    """Where nothing is compressed, squared distances of points are the ranking plus a constant."""
    empty = RaceSketch.srp(dim=2, rows=10, bits=3)
    sketches = [make(i / 3, i, 20 + 30 * i, empty=empty) for i in range(12)]
    writer = SketchTableWriter(12, sketches[0])
    writer.add(enumerate(sketches))
    table = writer.done()
    compressor = Compressor(table.cells, ceiling=float(table.energy.max()))
    points = compressor.points(table.vectors(slice(None)), table.energy)
    query = query_vector(make(1.0, 50, empty=empty))
    squares = ((points - compressor.points(query[None])) ** 2).sum(axis=1)
    expected = table.scores(query) + (1 - ENERGY_SHARE) * table.energy.max()
    np.testing.assert_allclose(squares, expected, atol=1e-5)


def test_compression_keeps_distances(make):
    """CountSketch to 256: squared distances within 5 standard deviations, sqrt(2/256) each."""
    sketches = [make(i / 3, i, 300, empty=WIDE) for i in range(12)]
    writer = SketchTableWriter(12, sketches[0])
    writer.add(enumerate(sketches))
    table = writer.done()
    vectors = table.vectors(slice(None)).astype(float)
    points = Compressor(table.cells, 1.0).points(vectors)
    assert points.shape == (12, 257)
    gaps = ((vectors[:, None] - vectors) ** 2).sum(axis=2)
    short = ((points[:, None] - points) ** 2).sum(axis=2)
    pairs = np.triu_indices(12, 1)
    np.testing.assert_allclose(short[pairs], gaps[pairs], rtol=5 * (2 / 256) ** 0.5)


@pytest.mark.parametrize("engine", ["scan", pytest.param("faiss", marks=needs_faiss)])
def test_an_index_finds_what_exact_search_finds(registry, make, engine, monkeypatch):
    """400 clients through 80 candidates of 256 dimensions: 28 of 30 first answers agree.

    A wrong coordinate, projection or re-ranking leaves far fewer.
    """
    monkeypatch.setattr("fedcohort.personalize.index.CANDIDATES", 80)
    if engine == "scan":
        monkeypatch.setattr("fedcohort.personalize.index.InvertedFile.cluster", _no_faiss)
    sketches = fill(registry, make, 400, empty=WIDE)
    exact, many = Search(registry), Search(registry, exact=100)
    assert exact.index is None
    assert isinstance(many.index.engine, Scan) == (engine == "scan")
    agree = 0
    for seed in range(30):
        query = make(seed, 5000 + seed, 200, empty=WIDE)
        agree += exact.nearest(query) == many.nearest(query)
    assert agree >= 28
    assert len(sketches) == len(many.index.table)


def _no_faiss(points, seed=0):
    raise ImportError("as if faiss were not installed")


@pytest.mark.parametrize("engine", ["scan", pytest.param("faiss", marks=needs_faiss)])
def test_an_index_is_kept_and_followed_by_changes(registry, make, engine, monkeypatch):
    if engine == "scan":
        monkeypatch.setattr("fedcohort.personalize.index.InvertedFile.cluster", _no_faiss)
    fill(registry, make, 150, empty=WIDE)
    built = Search(registry, exact=100)
    query = make(2.0, 7777, 300, empty=WIDE)
    before = built.nearest(query, k=5)
    with Registry(registry.path) as other:
        opened = Search(other, exact=100)
        assert opened.index.table.counts.shape == (150, 80, 16)
        assert opened.nearest(query, k=5) == before
        registry.add("twin", make(2.0, 7778, 300, empty=WIDE), reference="twin")
        assert "twin" in {f.client for f in opened.nearest(query, k=5)}
        assert opened.last == 150  # the newcomer is compared on its own
        for near in before:
            registry.remove(near.client)
        after = {f.client for f in opened.nearest(query, k=5)}
        assert len(after) == 5
        assert not after & {near.client for near in before}
        for i in range(150):
            if f"c{i}" in registry and i != 70:
                registry.remove(f"c{i}")
        assert {f.client for f in opened.nearest(query, k=5)} == {"c70", "twin"}
    folders = indexes(registry)
    assert len(folders) == 1
    Search(registry, exact=0).build()
    assert len(indexes(registry)) == 1
    assert indexes(registry) != folders


def indexes(registry):
    return [path for path in (registry.path / "index").iterdir() if path.is_dir()]


def damage(path, rng):
    """Change, cut or lengthen a file."""
    content = bytearray(path.read_bytes())
    match rng.integers(4):
        case 0:
            content[rng.integers(len(content))] ^= 1 << rng.integers(8)
        case 1:
            del content[rng.integers(len(content)) :]
        case 2:
            content += b"more"
        case 3:
            at = rng.integers(len(content))
            content[at : at + 8] = rng.bytes(8)
    if bytes(content) == path.read_bytes():
        content += b"more"
    path.write_bytes(content)


@pytest.mark.parametrize("engine", ["scan", pytest.param("faiss", marks=needs_faiss)])
def test_a_damaged_index_is_found_and_searched_around_and_built_again(
    registry, make, engine, monkeypatch
):
    """`check` finds every damage; a search answers with or without the index, never crashes."""
    if engine == "scan":
        monkeypatch.setattr("fedcohort.personalize.index.InvertedFile.cluster", _no_faiss)
    sketches = fill(registry, make, 120, empty=WIDE)
    search = Search(registry, exact=100)
    query = make(2.0, 7777, 300, empty=WIDE)
    expected = ranked_by_hand(query, sketches)[0]
    rng = np.random.default_rng(0)
    names = sorted(path.name for path in indexes(registry)[0].iterdir())
    assert len(names) == {"scan": 6, "faiss": 8}[engine]
    used = 0
    for name in [name for name in names for _ in range(6)]:
        damage(indexes(registry)[0] / name, rng)
        assert [p.kind for p in check(registry)] == ["index"]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            found = Search(registry, exact=100)
        used += found.index is not None
        if found.index is None:
            assert found.nearest(query)[0].client == expected
        else:  # damaged numbers may hide a client, but those returned are compared exactly
            assert found.nearest(query)[0].squared >= search.nearest(query)[0].squared
        search.rebuild()
        assert check(registry) == []
        assert search.nearest(query)[0].client == expected
    assert used < len(names) * 6 / 2


def test_a_damaged_index_is_warned_about(registry, make):
    fill(registry, make, 120, empty=WIDE)
    Search(registry, exact=100)
    (indexes(registry)[0] / "index.json").write_text("{}")
    with pytest.warns(RuntimeWarning, match=r"damaged.*`fedcohort registry index`.*are compared"):
        search = Search(registry, exact=100)
    assert search.index is None
    search.rebuild()
    assert search.index is not None


def test_a_deleted_index_is_built_again_and_other_names_lead_nowhere(registry, make):
    import shutil

    fill(registry, make, 120, empty=WIDE)
    Search(registry, exact=100)
    shutil.rmtree(registry.path / "index")
    assert Search(registry, exact=100).index is not None
    for name in ("../../elsewhere", 7, ["x"]):
        registry.set_fact("index", name)
        assert [p.kind for p in check(registry)] == ["index"]
        with pytest.warns(RuntimeWarning, match="not the name of an index"):
            assert Search(registry, exact=100).index is None


def test_few_clients_need_no_index(registry, make):
    fill(registry, make, 20)
    search = Search(registry, exact=10)
    assert search.index is not None
    Search(registry).rebuild()
    assert registry.fact("index") is None
    assert not (registry.path / "index").exists()


def test_a_damaged_sketch_is_skipped_and_named(registry, make):
    sketches = fill(registry, make, 10)
    query = make(1.0, 99)
    best, second = ranked_by_hand(query, sketches)[:2]
    with registry.db.writing() as db:
        number = db.execute("SELECT number FROM clients WHERE id = ?", (best,)).fetchone()
        db.execute("UPDATE sketches SET content = ? WHERE number = ?", (b"nothing", *number))
    with pytest.warns(RuntimeWarning, match=f"client '{best}' is skipped"):
        search = Search(registry)
    assert search.skipped.keys() == {best}
    assert search.nearest(query)[0].client == second
    assert {f.client for f in search.nearest(query, k=10)} == sketches.keys() - {best}
    registry.add(best, sketches[best], reference="x", replace=True)
    assert Search(registry).nearest(query)[0].client == best


def test_clients_without_models_are_found_but_not_advised(registry, make):
    for i in range(5):
        registry.add(f"bare {i}", make(1.0, i))
    registry.add("with", make(1.2, 9), {"w": np.ones(2)})
    assert registry.get("bare 0").model is None
    with pytest.raises(ConfigError, match="'bare 0' was registered without a model"):
        registry.model("bare 0")
    start = ColdStart(registry, max_distance=None)
    assert len(start.nearest(make(1.0, 20), k=6)) == 6
    for strategy in ("nearest", "k-nearest", "match", "cluster"):
        assert start.advise(make(1.0, 20), strategy).weights == {"with": 1.0}
    registry.remove("with")
    with pytest.raises(NoClients, match="no client with a model"):
        start.advise(make(1.0, 20))


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_there_are_no_more_lists_than_points(count):
    pytest.importorskip("faiss")
    from fedcohort.personalize.index import InvertedFile

    points = np.arange(2.0 * count, dtype=np.float32).reshape(count, 2)
    centers, lists = InvertedFile.cluster(points)
    assert len(centers) <= count
    assert lists.shape == (count,)
