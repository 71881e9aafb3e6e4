"""Where a flow meets the world: Spark, or the local runtime that needs no JVM. The only package that imports pyspark."""
