"""Decisions about a flow, all of them pure: which stages run it, where its rows travel."""
