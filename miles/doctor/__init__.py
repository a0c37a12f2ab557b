"""`miles doctor loss`: proves that loss and gradient of a configuration do not depend on how its work is split."""
