"""Pure decisions about a flow: its stages, the paths of its rows, and the scope of a change."""
