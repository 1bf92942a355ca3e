"""``fedcohort policies``: what there is, what it asks for, what that costs."""

from __future__ import annotations

from typing import Annotated

import typer

from fedcohort.cli.common import Format, FormatOption, ImportOption, import_all, show, show_json


def command(
    clients: Annotated[int, typer.Option(help="Clients in the federation.", min=1)] = 100,
    cohort_size: Annotated[int, typer.Option(help="Clients per round.", min=1)] = 10,
    parameters: Annotated[int, typer.Option(help="Numbers in the model.", min=1)] = 52_500,
    imports: ImportOption = None,
    format: FormatOption = Format.table,
) -> None:
    """List the selection policies, the signals they need and the bytes those cost.

    Example: `fedcohort policies --clients 1000 --parameters 1000000`
    """
    from fedcohort.analysis.costs import policy_costs
    from fedcohort.policies import POLICIES
    from fedcohort.registry import load_installed

    import_all(imports)
    load_installed("policy", POLICIES)
    rows = policy_costs(clients, cohort_size, 4 * parameters)
    if format is Format.json:
        show_json(rows)
        return
    from fedcohort.report.tables import cost_table

    show(cost_table(rows, clients, cohort_size, parameters))
