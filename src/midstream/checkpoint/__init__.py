"""The files that a job keeps on disk: manifests, change log, layouts of state, audit files; how they are swept and
inspected."""
