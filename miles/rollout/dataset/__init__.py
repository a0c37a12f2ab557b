"""Files of rows: where each row begins, reading one, several files as one, and the order in which rows are drawn."""
