"""Aggregates of the rows of each key, for very many keys at once.

Everything here is columnar: an aggregation keeps a few *columns*, arrays with one element per key. Rows are converted
to such columns, and the elements of one key are combined, in the same way over the rows of a block, the blocks of a
task, the epochs of a job and the panes of a window.

=================== ==============================================================
:mod:`.runs`        which elements belong together
:mod:`.base`        the interface of an aggregation
:mod:`.sums`        count, sum, mean
:mod:`.extremes`    min, max
:mod:`.sketches`    approx_distinct
:mod:`.recent`      last
:mod:`.totals`      all aggregations of an operator, and their bytes in state
:mod:`.partials`    totals of many keys, joined with others
:mod:`.running`     running totals of each key
:mod:`.windows`     totals of tumbling and sliding windows
:mod:`.sessions`    totals of sessions
:mod:`.combiner`    adding up before rows travel
=================== ==============================================================
"""
