"""Other engines that benchmarks compare with, each in an environment and processes of its own."""
