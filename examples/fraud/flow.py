"""Payment fraud detection: the flow of figure 1 in the Fries paper.

Every payment is judged twice, once by what its customer usually does (FC) and once by what is usual at its merchant
(FM); the model combiner (MC) weighs the two opinions, and suspicious payments become alerts.
"""

from __future__ import annotations

from typing import Any

from midstream import ConsoleSink, Flow, GeneratorSource, NoopSink

from .models import Combine, FirstOpinion, Models, judge, train
from .payments import COLUMNS, Bank

SCORED_BY_FM = (
    f"{COLUMNS}, event_time timestamp, home_city string, usual_amount double, p_customer double, "
    "category string, usual_ticket double, risk double, p_merchant double, fm int"
)
"""The columns of a payment after FM."""


def build(source: GeneratorSource, alerts: Any, models: Models | None = None, mixtures: Any = None) -> Flow:
    """Payments come from ``source``, alerts go to ``alerts``, which is any sink; models are trained unless given.

    Payments that met the old version of one operator and the new one of another would go to ``mixtures``.
    """
    bank, models = Bank(), models or train()
    flow = Flow("fraud")
    judged = (
        flow.source("payments", source)
        .key_by("by customer", "user")
        .lookup("customer", bank.customers(), on="user")
        .map_batches("FC", models.customer, adds="p_customer double")
        .key_by("by merchant", "merchant")
        .lookup("merchant", bank.merchants(), on="merchant")
        .map_batches("FM", FirstOpinion(models.merchant), adds="p_merchant double, fm int")
        .map_batches("MC", Combine({"p_customer": 0.4, "p_merchant": 0.6}), adds="p_fraud double, mc int")
    )
    verdict = judged.route_batches("verdict", judge, branches=("alert", "pass", "mixture"))
    verdict["alert"].sink("alerts", alerts)
    verdict["pass"].sink("passed", NoopSink())
    verdict["mixture"].sink("mixtures", mixtures or NoopSink())
    return flow


def flow() -> Flow:
    """For the command line: ``midstream run examples.fraud.flow:flow`` prints alerts, ``midstream graph`` draws it."""
    return build(Bank().payments(rate=10_000), ConsoleSink(limit=5))
