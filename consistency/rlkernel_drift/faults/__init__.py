"""Planted faults: worlds of two engines, kinds of faults that the grammar knows, and kinds that it does not contain."""

from rlkernel_drift.faults import unseen as unseen
from rlkernel_drift.faults.kinds import KINDS as KINDS
