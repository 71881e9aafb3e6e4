"""One module per operator: how it turns a slice of rows into slices of rows."""
