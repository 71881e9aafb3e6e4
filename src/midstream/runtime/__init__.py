"""Where a flow meets the world: Spark, or the local runtime without a JVM. The only package that imports pyspark."""
