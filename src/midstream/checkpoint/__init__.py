"""What a job keeps on disk: manifests, change log, layouts of state, audit files; how it is swept and inspected."""
