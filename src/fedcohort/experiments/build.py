"""From an experiment's description to the simulation it describes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from fedcohort.datasets import Dataset, Federation, federate, load
from fedcohort.exceptions import ConfigError
from fedcohort.experiments.config import DataConfig, Experiment, LocalConfig, NamedConfig
from fedcohort.gates import GATES, Gate
from fedcohort.policies import POLICIES, Policy
from fedcohort.simulate.aggregation import AGGREGATIONS
from fedcohort.simulate.availability import AVAILABILITIES, Availability
from fedcohort.simulate.local import LocalTraining, Schedule
from fedcohort.simulate.models import build as build_model
from fedcohort.simulate.seed import Aggregation
from fedcohort.simulate.simulation import Simulation


def dataset_of(data: DataConfig) -> Dataset:
    """Load the data set that the experiment names."""
    dataset = load(data.dataset, data.root)
    return dataset.standardized() if data.standardize else dataset


def federation_of(data: DataConfig, dataset: Dataset, seed: int) -> Federation:
    """Split the data set over the clients of one seed."""
    options = {} if data.partition == "natural" else {"clients": data.clients}
    try:
        return federate(dataset, data.partition, seed=seed, **options, **data.options)
    except TypeError as error:
        raise ConfigError(f"[data] options of partition {data.partition!r}: {error}") from None


def policy_of(config: NamedConfig) -> Policy:
    """Make the policy, with errors that name its options."""
    policy: Policy = _made("policy", POLICIES, config)
    return policy


def gate_of(config: NamedConfig) -> Gate | None:
    """Make the gate; "none" is no gate at all."""
    gate: Gate = _made("gate", GATES, config)
    return None if config.name == "none" else gate


def simulation_of(experiment: Experiment, dataset: Dataset) -> Simulation:
    """Put the whole experiment together, at round 0."""
    shape = dataset.x.shape[1:]
    policy_of(experiment.policy)  # a wrong option is reported before anything is loaded
    aggregation: Aggregation = _made("aggregation", AGGREGATIONS, experiment.aggregation)
    availability: Availability = _made("availability", AVAILABILITIES, experiment.availability)
    return Simulation(
        lambda seed: federation_of(experiment.data, dataset, seed),
        lambda seed: build_model(experiment.model.name, shape, dataset.classes, seed=seed),
        lambda: policy_of(experiment.policy),
        cohort_size=experiment.cohort_size,
        local=local_of(experiment.local),
        aggregation=aggregation,
        availability=availability,
        dropout=experiment.dropout,
        gate=gate_of(experiment.gate),
        seeds=experiment.seeds,
        device=experiment.device,
        evaluate_every=experiment.evaluate_every,
    )


def local_of(config: LocalConfig) -> LocalTraining:
    """Translate the flat table of a config file."""
    if config.halve_at and config.round_decay != 1.0:
        raise ConfigError("[local] give halve_at or round_decay, not both")
    schedule = None
    if config.halve_at:
        schedule = Schedule(0.5, config.halve_at)
    elif config.round_decay != 1.0:
        schedule = Schedule(config.round_decay)
    return LocalTraining(
        epochs=config.epochs,
        steps=config.steps,
        batch_size=config.batch_size,
        optimizer=config.optimizer,
        lr=config.lr,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
        prox_mu=config.prox_mu,
        epoch_decay=config.epoch_decay,
        schedule=schedule,
    )


def _made(what: str, registry: Mapping[str, Callable[..., Any]], config: NamedConfig) -> Any:
    """Call a registry's entry with the configured options."""
    if config.name not in registry:
        known = ", ".join(sorted(registry))
        raise ConfigError(f"[{what}] name = {config.name!r} is unknown; known: {known}")
    maker = registry[config.name]
    allowed = list(inspect.signature(maker).parameters)
    for key in config.options:
        if key not in allowed:
            known = ", ".join(allowed) or "none"
            raise ConfigError(f"[{what}] {config.name!r} has no option {key!r}; known: {known}")
    try:
        return maker(**config.options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"[{what}] {config.name!r}: {error}") from None
