"""The contract: its id, the orders of all reductions, tolerances and the bitwise comparison.

The lowest layer: every other layer may import it, and it imports nothing from rlkernel.
"""

from rlkernel.contract.bitwise import BitwiseReport, MismatchError, assert_bitwise, compare_bitwise
from rlkernel.contract.orders import CONTRACT_ID, ORDERS, Order, contract_id
from rlkernel.contract.tolerances import TOLERANCES, Tolerance, assert_accurate

__all__ = [
    "CONTRACT_ID",
    "ORDERS",
    "TOLERANCES",
    "BitwiseReport",
    "MismatchError",
    "Order",
    "Tolerance",
    "assert_accurate",
    "assert_bitwise",
    "compare_bitwise",
    "contract_id",
]
