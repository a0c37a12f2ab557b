"""`miles reward check`: grades saved responses again and compares with the rewards that they have."""
