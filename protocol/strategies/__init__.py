"""Strategies of synchronisation: an object for each, behind one interface, and the table of them."""
