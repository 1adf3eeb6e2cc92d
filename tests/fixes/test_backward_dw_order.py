"""``backward-dw-order`` on the simulator."""

from __future__ import annotations

import itertools

import pytest

from te_graph_fixes.verify.cases import Case
from tests.support.child import measured
from tests.support.legal_orders import NAMED, random_orders


@pytest.mark.parametrize("module", ["layernorm_linear", "grouped_linear"])
def test_orders_give_what_eager_gives(module: str) -> None:
    orders = [order for order in [*NAMED.values(), *random_orders(4, 4)] if len(order) < 30]
    cases = [
        Case(
            f"{order}, {reuse}",
            (),
            "programs:compare",
            {"modules": (module,) * int(max(order)), "delay": True, "bias": True, "order": order, "reuse": reuse},
        )
        for order, reuse in itertools.product(orders, (False, True))
    ]
    found = measured(*cases)
    assert [case for case, line in found.items() if line["error"]] == []
    assert len(found) == len(cases)
