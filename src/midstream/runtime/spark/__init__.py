"""The edge towards Spark. Only modules in this folder import pyspark."""
