"""Spark's own Hadoop decides whether it can reach a location."""

from __future__ import annotations

from typing import Any

from midstream.runtime.spark.storage_check import hadoop_knows


def test_hadoop_reports_which_file_systems_it_has(spark: Any) -> None:
    knows = hadoop_knows(spark)
    assert [knows(scheme) for scheme in ("file", "hdfs", "memory", "dir")] == [True, True, False, False]
