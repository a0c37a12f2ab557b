"""`miles data check`: every row of a data file, looked at as a run would."""
