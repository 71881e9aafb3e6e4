"""The Spark runtime. Only modules in this folder import pyspark."""
