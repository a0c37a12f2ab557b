"""Records, ports, plug-in loading and the ledger. Imports no torch."""
