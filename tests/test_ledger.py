from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fedcohort.ledger import Ledger

charges = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.sampled_from(["model", "loss"]),
        st.sampled_from(["up", "down"]),
        st.dictionaries(st.sampled_from(["a", "b", "c/1"]), st.integers(0, 999), max_size=3),
    ),
    max_size=12,
)


@given(charges)
def test_all_views_add_up(entries):
    ledger = Ledger()
    for entry in entries:
        ledger.charge(*entry)
    for way in ("up", "down"):
        total = sum(sum(sizes.values()) for _, _, w, sizes in entries if w == way)
        assert ledger.total(way) == total
        assert sum(ledger.by_kind(way).values()) == total
        assert sum(ledger.by_client(way).values()) == total
        assert sum(ledger.total(way, r) for r in range(4)) == total
