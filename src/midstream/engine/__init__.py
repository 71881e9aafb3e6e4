"""What runs inside a task: frames, slices, operators and the stage runner. Plain Python over Arrow; knows no Spark."""
