"""The runtimes of a flow: Spark, and the local runtime without a JVM. The only package that imports pyspark."""
