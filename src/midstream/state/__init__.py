"""Keyed state: bins of keys and values that survive retries, restarts and moves.

A task never changes committed state. It reads a *base* (a local cache of what is committed) through its own overlay,
and writes one *delta* file to the checkpoint location; the epoch's manifest makes that delta part of the operator's
*lineage*. From bottom to top:

================== ===================================================================================================
:mod:`.integers`   integers and times to bytes that sort like them
:mod:`.keys`       key columns to bytes and back, and the distinct keys of a slice
:mod:`.key_arrays` the same for whole arrays of stored keys
:mod:`.values`     Python objects and packed structs to bytes and back
:mod:`.files`      delta and snapshot files, with checksums
:mod:`.file_index` the index of a large file, with which some of its bins are read alone
:mod:`.lineage`    which files make up the state, what a base lacks, which rewrites are due
:mod:`.garbage`    which files no restart needs any more
:mod:`.mapped`     one LMDB environment shared by several processes, replaced when it cannot be trusted
:mod:`.marks`      position and row count of each bin in a base
:mod:`.base`       the local cache of committed state
:mod:`.view`       what a task sees of a base
:mod:`.task`       the state one task reads and changes
:mod:`.panes`      rows by time and key, for joins
:mod:`.handle`     the state of one key as a user's function sees it
:mod:`.keeper`     the handles of one task: loading, timers, expiry, writing
:mod:`.access`     opens the state of an operator for a worker
:mod:`.contents`   everything that is stored, for inspection
================== ===================================================================================================
"""
