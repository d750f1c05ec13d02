"""Sealed connections for bulk data, several per peer."""
