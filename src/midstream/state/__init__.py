"""Keyed state: bins of keys and values that survive retries, restarts and moves.

A task never changes committed state. It reads a *base* (a local cache of what is committed) through its own overlay,
and writes one *delta* file to the checkpoint location; the epoch's manifest makes that delta part of the operator's
*lineage*. From bottom to top:

================== ==================================================================================
:mod:`.integers`   integers and times to bytes that sort as they do
:mod:`.keys`       key columns to bytes and back, and the distinct keys of a slice
:mod:`.key_arrays` the same for whole arrays of stored keys
:mod:`.values`     Python objects and packed structs to bytes and back
:mod:`.files`      delta and snapshot files, with checksums
:mod:`.lineage`    which files make the state, what a base lacks, what is due, what is garbage
:mod:`.mapped`     one LMDB environment that several processes share, grow and distrust
:mod:`.base`       the local cache of committed state
:mod:`.task`       what one task reads and changes
:mod:`.panes`      rows by time and key, for joins
:mod:`.handle`     what a user's function sees of one key
:mod:`.keeper`     the handles of one task: loading, timers, expiry, writing
:mod:`.access`     how a worker reaches all this
:mod:`.contents`   all that is stored, for looking
================== ==================================================================================
"""
