"""``fedcohort profile``, ``plan`` and ``policies``: what to know before any training."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

from fedcohort.cli.common import (
    ForceOption,
    FormatOption,
    ImportOption,
    import_all,
    option,
    plain_values,
    show,
    write_file,
)
from fedcohort.cli.sketches import Sketches, load_several
from fedcohort.exceptions import ConfigError
from fedcohort.options import Count, parse_value, typed
from fedcohort.registry import load_installed
from fedcohort.report.tables import Cell, Column, cells, number, worth_cells

if TYPE_CHECKING:
    from fedcohort.analysis.plan import Plan
    from fedcohort.sketch.race import RaceSketch


def profile(
    sketches: Sketches,
    out: Annotated[
        Path, option("The page; its numbers go beside it as JSON.", "--out", "-o")
    ] = Path("heterogeneity.html"),
    title: Annotated[str, option("Title of the page.")] = "How different are the clients?",
    cohort_size: Annotated[
        int, option("Clients per round that the page plans for; 0 for no plan.", min=0)
    ] = 5,
    against: Annotated[
        Path | None,
        option("Folder of earlier sketches of these clients: say what has changed since."),
    ] = None,
    force: ForceOption = False,
    format: FormatOption = "table",
) -> None:
    """Show how different the clients are: what to look at, distances, outliers, clusters.

    Example: `fedcohort profile site-*.sketch -o heterogeneity.html`
    """
    from fedcohort.analysis.heterogeneity import measure
    from fedcohort.files.sketching import check_output, client_names
    from fedcohort.report.page import profile_page

    if out.suffix == ".json":
        raise ConfigError(f"-o {out}: name the page, such as {out.with_suffix('.html')}")
    beside = out.with_suffix(".json")
    paths, loaded = load_several(sketches, "a profile")
    for path in (out, beside):
        check_output(path, paths, force)
    names = client_names(paths)
    measured = measure(loaded, names, _earlier(against, paths[0]))
    cohorts = _cohorts(loaded, names, cohort_size)
    numbers = plain_values({**measured.as_dict(cohorts), "plan": cohorts})
    write_file(out, profile_page(measured, title, cohorts).encode())
    write_file(beside, json.dumps(numbers).encode())
    written = {"page": str(out), "numbers": str(beside)}
    show(format, {**written, **numbers}, {**measured.facts(cohorts), **written}, title)


def _earlier(folder: Path | None, present: Path) -> dict[str, RaceSketch]:
    """Load the earlier sketches of clients, by name; they must be like a present one."""
    from fedcohort.files.sketching import client_names, load_alike

    if folder is None:
        return {}
    _, *loaded = load_alike([present, folder])
    names = client_names([path for path, _ in loaded])
    return dict(zip(names, (sketch for _, sketch in loaded), strict=True))


def _cohorts(sketches: Sequence[RaceSketch], names: Sequence[str], size: int) -> Plan | None:
    """Return what choosing cohorts is worth, None where the sketches cannot tell."""
    from fedcohort.analysis.plan import plan
    from fedcohort.sketch.uncertainty import too_few

    enough = int((~too_few(sketches)).sum())
    if not size or enough <= size or sketches[0].rows < 2:
        return None
    return plan(sketches, [size], names=names)


def plan(
    sketches: Sketches,
    cohort_size: Annotated[
        str, option("Comma-separated cohort sizes to judge.", "--cohort-size", "-k")
    ] = "5",
    policy: Annotated[
        list[str] | None,
        option(
            "A policy that selects by sketches, such as sketch-match:turns=1. May be "
            "repeated [sketch-match and sketch-match:turns=1]."
        ),
    ] = None,
    present: Annotated[
        int | None,
        option(
            "The random cohort size in use today: find the smallest matched cohort that is "
            "worth as much."
        ),
    ] = None,
    durations: Annotated[
        Path | None,
        option("CSV with the columns client and seconds: how long each takes for a round."),
    ] = None,
    format: FormatOption = "table",
) -> None:
    """Estimate, before any training, what choosing cohorts by sketches is worth.

    Example: `fedcohort plan sketches/ --cohort-size 5,10 --present 20`
    """
    from fedcohort.analysis.plan import plan as estimate
    from fedcohort.files.sketching import client_names
    from fedcohort.simulate.clock import Durations

    parts = [parse_value(part.strip()) for part in cohort_size.split(",")]
    sizes = typed(tuple[Count, ...], parts, "--cohort-size")
    paths, loaded = load_several(sketches, "a plan")
    expected = estimate(
        loaded,
        sizes,
        policy or ["sketch-match", "sketch-match:turns=1"],
        names=client_names(paths),
        present=present,
        durations=None if durations is None else Durations.read(durations).per_round,
    )
    show(format, expected, worth_cells(expected), "Worth of a cohort")
    if format == "table":
        show(format, None, expected.lines())


def policies(
    clients: Annotated[int, option("Clients in the federation.", min=1)] = 100,
    cohort_size: Annotated[int, option("Clients per round.", min=1)] = 10,
    parameters: Annotated[int, option("Numbers in the model.", min=1)] = 52_500,
    imports: ImportOption = None,
    format: FormatOption = "table",
) -> None:
    """List the selection policies, the signals they need and the bytes those cost.

    Example: `fedcohort policies --clients 1000 --parameters 1000000`
    """
    from fedcohort.policies import POLICIES

    import_all(imports)
    load_installed("policy", POLICIES)
    rows = policy_costs(clients, cohort_size, 4 * parameters)
    columns = [
        Column("policy", lambda r: Cell(r.policy), number=False),
        Column("asks for", lambda r: Cell(r.asks_for), number=False, wraps=True),
        Column("kB once", lambda r: number(r.once / 1e3)),
        Column("kB per round", lambda r: number(r.each_round / 1e3)),
        Column("models per round", lambda r: number(r.models_each_round)),
        Column("use it when", lambda r: Cell(r.when), number=False, wraps=True),
    ]
    title = f"{clients} clients, cohorts of {cohort_size}, a model of {parameters:,} parameters"
    show(format, rows, cells(rows, columns), title)


class CostRow(NamedTuple):
    """Bytes of one policy, all messages, for all clients together, and the signals it asks for."""

    policy: str
    asks_for: str
    once: int  # what clients send about themselves when they are first seen
    each_round: float  # the other signals, on average
    models_each_round: float  # transfers of a model, down and up
    when: str


def policy_costs(
    clients: int, cohort_size: int, model_bytes: int, rounds: int = 20
) -> list[CostRow]:
    """Run every policy for some rounds, with made-up readings, and read its ledger."""
    from fedcohort.policies import POLICIES
    from fedcohort.session import Session
    from fedcohort.testing import drive

    names, rows = [f"{i:07d}" for i in range(clients)], []
    for name in sorted(POLICIES):
        policy, size = POLICIES[name](), min(cohort_size, clients)
        session = Session(policy, cohort_size=size, seed=0, model_bytes=model_bytes)
        for _ in range(rounds):
            drive(session, names)
        up, down = session.ledger.by_kind("up"), session.ledger.by_kind("down")
        models = up.pop("model", 0) + down.get("model", 0)
        once = sum(up.pop(kind, 0) for kind in policy.needs.profile)
        asked = {"once": policy.needs.profile, "before": policy.needs.query}
        asked["after"] = policy.needs.reply
        signals = [f"{when}: {', '.join(sorted(what))}" for when, what in asked.items() if what]
        each_round, models_each_round = sum(up.values()) / rounds, models / model_bytes / rounds
        asks_for = "; ".join(signals) or "nothing"
        rows.append(CostRow(name, asks_for, once, each_round, models_each_round, policy.when))
    return rows
