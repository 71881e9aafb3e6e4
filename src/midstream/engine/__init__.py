"""The code that runs inside a task: frames, slices and the stage runner. Plain Python over Arrow, without Spark."""
