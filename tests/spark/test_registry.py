"""The example that follows an alias in MLflow's registry of models."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # the registry's own
def test_a_job_follows_an_alias_and_a_broken_version_is_rolled_back(spark: Any) -> None:
    pytest.importorskip("mlflow", reason="MLflow is not installed: pip install mlflow-skinny")
    from examples.registry import main

    seen = main(spark)
    assert list(seen["outcomes"]) == [2, 3]
    assert seen["outcomes"][2] == "applied"
    assert seen["outcomes"][3].startswith(("refused", "rolled back")), "by the preflight, or by its first epoch"
    assert (seen["met"], seen["mixed"]) == ([1, 2], 0)
