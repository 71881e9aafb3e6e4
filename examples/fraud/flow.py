"""Payment fraud detection: the flow of figure 1 in the Fries paper.

Every payment is judged twice, once by what its customer usually does (FC) and once by what is usual at its merchant
(FM); the model combiner (MC) weighs the two opinions, and suspicious payments become alerts.
"""

from __future__ import annotations

from benchmarks.workloads.payments import Bank
from examples.fraud.models import Combine, FirstOpinion, Models, judge, train
from midstream import ConsoleSink, Flow, GeneratorSource, NoopSink
from midstream.flow.sinks import SinkTarget


def build(
    source: GeneratorSource, alerts: SinkTarget, models: Models | None = None, mixtures: SinkTarget | None = None
) -> Flow:
    """Payments come from ``source``, alerts go to ``alerts``; models are trained unless given.

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
