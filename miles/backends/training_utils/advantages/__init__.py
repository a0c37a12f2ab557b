"""From rewards to one advantage per response token: a file for each estimator, and a table of them."""

from miles.backends.training_utils.advantages.custom import CustomAdvantages
from miles.backends.training_utils.advantages.records import AdvantageInputs, AdvantageOutput
from miles.backends.training_utils.advantages.table import ADVANTAGES, Estimator, compute_advantages
from miles.backends.training_utils.advantages.whitening import whiten

__all__ = [
    "ADVANTAGES",
    "AdvantageInputs",
    "AdvantageOutput",
    "CustomAdvantages",
    "Estimator",
    "compute_advantages",
    "whiten",
]
