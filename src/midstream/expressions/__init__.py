"""Expressions over columns: Spark's SQL, read by a parser of ours and computed by Arrow's kernels.

| module | holds |
|---|---|
| `tree` | what an expression is, as frozen data |
| `lexemes`, `parser` | from text to a tree |
| `compiler` | from a tree and a schema to something that computes a column of known type |
| `kernels` | what the compiled parts share: types they agree on, laziness, comparisons with NaN |
| `arithmetic`, `conversions`, `functions` | operators on numbers and times, casts, and the named functions |
| `constants` | Python values as expressions |
"""
