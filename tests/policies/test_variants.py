"""Policies with other than their default options keep the contract; wrong options are named."""

from __future__ import annotations

import pytest

from fedcohort.policies import (
    DELTA,
    FLIPS,
    KDPP,
    ClusteredSampling,
    DivFL,
    FedACS,
    FedCor,
    FedSAE,
    LabelMatch,
    RaceSoftmax,
    SketchMatch,
    SketchToSelect,
    Uniform,
)
from fedcohort.testing import check_policy

UNBIASED = "inverse-inclusion"
VARIANTS = [
    lambda: RaceSoftmax(debias=True, center="pooled", weights=UNBIASED),
    lambda: RaceSoftmax(distance="row-l2", temperature=0.01),
    lambda: SketchMatch(pool="random", average="equal", sweeps=0),
    lambda: SketchMatch(share=1.0, largest_pool=6),
    lambda: FedACS(insight=True, pool_share=0.05),
    lambda: FedACS(pool_share=1.0, rate=0.3),
    lambda: FedACS(gradient_sketch=7, weighted=True, scale_by_size=True),
    lambda: SketchToSelect(interval=2, weights=UNBIASED),
    lambda: SketchToSelect(interval=1, candidates=7),
    lambda: SketchToSelect(interval=1, compare="models"),
    lambda: SketchToSelect(signal="race_sketch", interval=3),
    lambda: SketchToSelect(signal="update_sketch", interval=2),
    lambda: FedCor(warmup=2, interval=3),
    lambda: FedCor(warmup=1, interval=2, panel=6),
    lambda: FedCor(warmup=2, interval=3, fit="gradient", steps=5),
    lambda: FedCor(warmup=2, interval=4, rank=1),
    lambda: KDPP("race_sketch", weights=UNBIASED),
    lambda: KDPP(kernel="features", candidates=7),
    lambda: KDPP("insight", candidates=3),
    lambda: DivFL("update_sketch", weights="coverage"),
    lambda: DivFL("race_sketch", method="stochastic"),
    lambda: DivFL(candidates=7),
    lambda: ClusteredSampling("similarity"),
    lambda: KDPP("gradient_sketch"),
    lambda: KDPP("model_sketch", k=10),
    lambda: Uniform(interval=3),
    lambda: FedCor(warmup=2, interval=4, samples=2, noise_std=0.01),
    lambda: SketchToSelect(interval=2, catch_up=True),
    lambda: LabelMatch("balanced", candidates=7),
    lambda: FLIPS(clusters=3),
    lambda: FedSAE(active_rounds=2),
    lambda: ClusteredSampling("similarity", "race_sketch", interval=1),
    lambda: DELTA(local_variance=0.5),
    lambda: SketchMatch(refresh=2, turns=2),
    lambda: SketchMatch(refresh=3, embed="model"),
]


@pytest.mark.parametrize("factory", VARIANTS, ids=lambda f: repr(f()))
def test_variants_keep_the_contract(factory) -> None:
    check_policy(factory)


@pytest.mark.parametrize(
    ("factory", "match"),
    [
        (lambda: RaceSoftmax(temperature=0), "temperature=0"),
        (lambda: RaceSoftmax(distance="l1"), "distance='l1'"),
        (lambda: RaceSoftmax(center="median"), "center='median'"),
        (lambda: RaceSoftmax(weights="size"), "weights='size'"),
        (lambda: SketchMatch(pool="half"), "pool='half'"),
        (lambda: SketchMatch(share=0), "share=0"),
        (lambda: SketchMatch(average="n"), "average='n'"),
        (lambda: SketchMatch(sweeps=-1), "sweeps=-1"),
        (lambda: FedACS(pool_share=0), "pool_share=0"),
        (lambda: FedACS(rate=-1), "rate=-1"),
        (lambda: FedACS(gradient_sketch=-1), "gradient_sketch=-1"),
        (lambda: FedACS(gradient_sketch=9, insight_step=True), "excludes insight_step=True"),
        (lambda: FedACS(gradient_sketch=9, last_layer=True), "excludes last_layer=True"),
        (lambda: FedACS(gradient_sketch=9, insight=True), "excludes insight=True"),
        (lambda: SketchToSelect(interval=0), "interval=0"),
        (lambda: SketchToSelect(signal="loss"), "signal 'loss'"),
        (lambda: SketchToSelect(compare="labels"), "compare='labels'"),
        (lambda: FedCor(interval=1), "interval=1"),
        (lambda: FedCor(panel=0), "panel=0"),
        (lambda: FedCor(beta=0), "beta=0"),
        (lambda: FedCor(noise_std=0), "noise_std=0"),
        (lambda: FedCor(fit="adam"), "fit='adam'"),
        (lambda: KDPP(signal="loss"), "signal 'loss'"),
        (lambda: KDPP(kernel="rbf"), "kernel='rbf'"),
        (lambda: KDPP(candidates=0), "candidates=0"),
        (lambda: DivFL(method="greedy"), "method='greedy'"),
        (lambda: DivFL(epsilon=1), "epsilon=1"),
        (lambda: DivFL(weights="inverse"), "weights='inverse'"),
        (lambda: ClusteredSampling(by="loss"), "by='loss'"),
        (lambda: ClusteredSampling(signal="loss"), "signal 'loss'"),
        (lambda: ClusteredSampling(interval=0), "interval=0"),
    ],
)
def test_wrong_options_are_named(factory, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        factory()
