"""Locality-sensitive hash families: seeded, and equal on every machine and in every process."""

from __future__ import annotations

from typing import Any

from fedcohort.registry import lookup
from fedcohort.sketch.hashing.base import HashFamily
from fedcohort.sketch.hashing.minhash import MinHash
from fedcohort.sketch.hashing.pstable import PStable
from fedcohort.sketch.hashing.srp import SRP

FAMILIES: dict[str, type[SRP] | type[MinHash] | type[PStable]] = {
    "srp": SRP,
    "minhash": MinHash,
    "pstable": PStable,
}

__all__ = ["FAMILIES", "SRP", "HashFamily", "MinHash", "PStable", "from_spec"]


def from_spec(spec: Any) -> HashFamily:
    """Rebuild a family from its `spec`; ValueError or TypeError for anything else.

    Examples
    --------
    >>> from_spec(SRP(dim=4, rows=2, bits=3, seed=1).spec()).buckets
    8
    """
    if not isinstance(spec, dict) or not isinstance(spec.get("name"), str):
        raise ValueError("a hash family must be an object with a name")
    options = {key: value for key, value in spec.items() if key != "name"}
    return lookup("hash family", spec["name"], FAMILIES)(**options)
